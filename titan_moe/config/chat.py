"""Conversations to fine-tune on: `[data.chat]`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ChatConfig:
    """Conversations, for `data.format = "chat"`: how they become tokens, and which tokens are learned.

    A row has `messages` (`role` and `content`), `conversations` (`from` and `value`, as ShareGPT writes), or `prompt`
    and `completion`, both texts or both lists of messages. It may have `tools`, `system` and `chat_template_kwargs`.
    Other keys of a message reach the template too, those without a value (null) at no depth. A message of the assistant
    with `weight` 0 is not learned. Text that spells a control token becomes one, as the template's own
    do. Conversations are never divided: as many as fit are packed into a sequence, and the rest of it is filled with
    tokens from its start, as a document without labels.
    """

    template: str = ""
    """The chat template: a file with one in Jinja, or empty for the tokenizer's own. A copy of the tokenizer's own with
    `{% generation %}` and `{% endgeneration %}` around what the model writes is a template with answers.
    `plain` puts the contents of messages one after the other, without roles, each answer with the end-of-sequence token
    behind it: for `prompt` and `completion` of a base model."""
    answers: Literal["template", "prefixes"] = "template"
    """How the tokens of answers are found.
    `template`: The tokens inside of the `{% generation %}` blocks of the template, as transformers marks them.
    `prefixes`: The conversation is rendered up to each answer, with the prompt for it, and up to its end. What is
    between them is the answer, without white space behind its last control token. A conversation is a bad row
    (`data.bad_rows`) if one of these is not the start of the whole, as where a template leaves the thinking of earlier
    answers out."""
    train_on: Literal["answers", "last_answer", "all"] = "answers"
    """The tokens that are learned.
    `answers`: Those of all messages of the assistant; with `prompt` and `completion`, of the completion.
    `last_answer`: Those of the last message of the assistant.
    `all`: All tokens, whatever their weight."""
    too_long: Literal["drop", "cut"] = "drop"
    """What happens to a conversation of more than `train.seq_len_tokens` + 1 tokens. The log counts them.
    `drop`: It is left out.
    `cut`: Its end is. It is left out if no token to learn remains."""
