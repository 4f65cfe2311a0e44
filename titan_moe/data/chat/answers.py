"""Find the tokens of a conversation that are learned."""

from collections.abc import Iterator
from os.path import commonprefix

import numpy as np

from titan_moe.config.chat import ChatConfig
from titan_moe.config.schema import in_toml
from titan_moe.data.chat.records import Conversation, RecordError
from titan_moe.data.chat.template import ChatTemplate

_SHOWN = 40
"""Characters of a text in a message."""


class _NotDivided(RecordError):
    """Messages are not rendered as the start of the whole conversation has them."""


def find_answers(template: ChatTemplate, conversation: Conversation, chat: ChatConfig) -> tuple[np.ndarray, np.ndarray]:
    """Render a conversation: the ids of its tokens, int64, and whether each is learned, bool.

    Raises: RecordError if the template refuses it, or its answers cannot be found, or it has none.
    """
    try:
        return _find(template, conversation, chat)
    except _NotDivided as error:
        ways_out = ['take a template with generation blocks for data.chat.answers = "template"']
        ways_out *= chat.answers == "prefixes"
        ways_out += ['set data.chat.train_on = "last_answer"'] * (chat.train_on == "answers")
        ways_out += ["split the row into one for each answer"] * (not ways_out)
        raise RecordError(f"{error}; {', or '.join(ways_out)}") from error


def _find(template: ChatTemplate, conversation: Conversation, chat: ChatConfig) -> tuple[np.ndarray, np.ndarray]:
    num_messages = len(conversation.messages)
    if chat.train_on == "all":
        ids, _ = template.encode(template.text(conversation, num_messages))
        return np.array(ids, dtype=np.int64), np.ones(len(ids), dtype=bool)
    answers = conversation.answers if chat.train_on == "answers" else conversation.answers[-1:]
    if not answers:
        weights = " of a weight above 0" if conversation.of_assistant else ""
        raise RecordError(f"has no answer: no message of the assistant{weights}")
    if chat.answers == "template":
        ids, offsets, marks = template.encode_marked(conversation)
        is_learned = np.array(marks, dtype=bool)
        if others := [number for number in conversation.of_assistant if number not in answers]:
            text = template.text(conversation, num_messages)
            is_learned &= ~_overlap(offsets, list(_spans_of_others(template, conversation, text, answers[0], others)))
    else:
        text = template.text(conversation, num_messages)
        ids, offsets = template.encode(text)
        is_learned = _overlap(offsets, [_span(template, conversation, text, number) for number in answers])
    if not is_learned[1:].any():  # the first token is no label
        raise RecordError("has no answer: the template renders no token of one")
    return np.array(ids, dtype=np.int64), is_learned


def _overlap(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> np.ndarray:
    """Whether each token has a character of one of the spans, as transformers decides it."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    is_in = [(ends > start) & (starts < end) for start, end in spans]
    return np.logical_or.reduce(is_in)


def _spans_of_others(
    template: ChatTemplate, conversation: Conversation, text: str, first: int, others: list[int]
) -> Iterator[tuple[int, int]]:
    """The characters of what is before the first answer, and of messages of the assistant after it that are none."""
    if others[0] < first:
        yield 0, _prefix(template, conversation, text, first)
    for number in others:
        if number > first:
            start = _prefix(template, conversation, text, number)
            yield start, _prefix(template, conversation, text, number + 1)


def _span(template: ChatTemplate, conversation: Conversation, text: str, number: int) -> tuple[int, int]:
    """The characters of an answer, without white space of the template behind its last control token: a model stops
    before it."""
    if number == 0:
        start = _start_of_first(template, conversation, text)
    else:
        start = _prefix(template, conversation, text, number, has_prompt=True)
    end = _prefix(template, conversation, text, number + 1)
    answer = text[start:end].rstrip()
    return start, start + len(answer) if answer.endswith(template.control_tokens) else end


def _prefix(
    template: ChatTemplate, conversation: Conversation, text: str, num_messages: int, has_prompt: bool = False
) -> int:
    """The number of characters of the first messages, with which the whole text must begin."""
    if num_messages == len(conversation.messages):
        return len(text)
    prefix = template.text(conversation, num_messages, has_prompt)
    if not text.startswith(prefix):
        same = len(commonprefix([text, prefix]))
        prompt = " with the prompt for an answer" if has_prompt else ""
        raise _NotDivided(
            f"cannot be divided into answers: its first {num_messages} messages{prompt} are rendered as "
            f"{_shown(prefix[same:])} where the whole conversation has {_shown(text[same:])}"
        )
    return len(prefix)


def _start_of_first(template: ChatTemplate, conversation: Conversation, text: str) -> int:
    """The character at which an answer starts that no message precedes. A template may write a system prompt before it,
    and renders no prompt for an answer to nothing, so it is looked for as it follows a user's message."""
    asked = conversation._replace(messages=[{"role": "user", "content": "?"}])
    before, prompted = template.text(asked, 1), template.text(asked, 1, has_prompt=True)
    prompt = prompted.removeprefix(before)
    if prompt in ("", prompted) or prompt not in text:
        raise RecordError(
            "begins with an answer, and the prompt for one is not found before it; take a template with generation "
            'blocks for data.chat.answers = "template", or begin the conversation with a message of the user'
        )
    return text.index(prompt) + len(prompt)


def _shown(text: str) -> str:
    return in_toml(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
