"""Render conversations with a chat template, by transformers."""

import hashlib
import inspect
import re
from pathlib import Path
from typing import Any

from titan_moe.data.chat.records import Conversation, RecordError

PLAIN = "plain"
"""The template that has contents only."""
_PLAIN = (
    "{% if begins_with_bos %}{{ bos_token }}{% endif %}{% for message in messages %}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
"""Beside the configuration of the tokenizer, in its folder."""
_TOKEN_FILES = ("special_tokens_map.json", "added_tokens.json")
"""In such a folder too. transformers reads them where the configuration has no `added_tokens_decoder`."""
_ANSWER_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """A tokenizer of transformers, and the template that it renders with.

    Ids are those of the folder's `tokenizer.json`. A control token that is spelled in a message becomes this token.

    Raises: ImportError without transformers; ValueError if there is no template, or it cannot be read.
    """

    def __init__(self, folder: str, template: str, *, begins_with_bos: bool) -> None:
        try:
            from transformers import PreTrainedTokenizerFast  # imported here: only chats need it
        except ImportError as error:
            raise ImportError(
                "data.format = 'chat' needs the package `transformers`: pip install -e '.[hf]'; "
                "or write the conversations as texts, for data.format = 'text'"
            ) from error
        try:
            self._inner: Any = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the library raises no narrower type
            raise ValueError(f"data.tokenizer = {folder!r} cannot be read by transformers: {error}") from error
        if template:
            self._inner.chat_template = _PLAIN if template == PLAIN else _read(template)
        self._variables = {"begins_with_bos": begins_with_bos} if template == PLAIN else {}
        self._name = f"data.chat.template = {template!r}" if template else f"data.tokenizer = {folder!r}"
        try:
            texts = [self._inner.get_chat_template(tools=tools) for tools in (None, [True])]
        except ValueError as error:
            raise ValueError(
                f"{self._name} has no chat template; set data.chat.template to a file with one, or to {PLAIN!r}, which "
                "puts the contents of messages one after the other"
            ) from error
        self._reserved = inspect.signature(self._inner.apply_chat_template).parameters.keys()
        self.has_date = any("strftime_now" in text for text in texts)
        self.has_answers = all(_ANSWER_BLOCK.search(text) for text in texts)
        added = self._inner.added_tokens_decoder.values()
        self.control_tokens = tuple(token.content for token in added if token.special)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._inner.get_vocab().values()) + 1

    def text(self, conversation: Conversation, num_messages: int, has_prompt: bool = False) -> str:
        """Render its first messages, and what makes the model answer if it `has_prompt`.

        Raises: RecordError if the template refuses them.
        """
        return self._render(conversation, num_messages, tokenize=False, add_generation_prompt=has_prompt)

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a rendered text: their ids, and the characters [start, end) of each.

        Raises: RecordError for a text that is none.
        """
        try:
            out = self._inner(text, add_special_tokens=False, verbose=False)  # which would warn of long ones
        except (TypeError, UnicodeError) as error:
            raise RecordError(f"has a text that is no Unicode, such as half of a pair \\ud83d: {error}") from error
        return out["input_ids"], out.encodings[0].offsets

    def encode_marked(self, conversation: Conversation) -> tuple[list[int], list[tuple[int, int]], list[int]]:
        """The same of all messages, and 1 for each token in a generation block.

        Raises: RecordError if the template refuses them.
        """
        out = self._render(
            conversation, len(conversation.messages), return_dict=True, return_assistant_tokens_mask=True
        )
        return out["input_ids"], out.encodings[0].offsets, out["assistant_masks"]

    def _render(self, conversation: Conversation, num_messages: int, **options: Any) -> Any:
        if reserved := self._reserved & conversation.options.keys():
            raise RecordError(f"has {min(reserved)!r} in `chat_template_kwargs`, which is no variable of a template")
        try:
            return self._inner.apply_chat_template(
                conversation.messages[:num_messages],
                tools=conversation.tools,
                tokenizer_kwargs={"verbose": False},
                **{**self._variables, **conversation.options, **options},
            )
        except Exception as error:  # a template is a program, and raises what it likes
            raise RecordError(f"is refused by the chat template: {type(error).__name__}: {error}") from error


def fingerprint(folder: str, template: str) -> str:
    """Identify the template without transformers, in cache keys. The tokenizer's fingerprint has its configuration."""
    if template == PLAIN:
        texts = [_PLAIN.encode()]
    elif template:
        texts = [_read(template).encode()]
    else:
        texts = [file.read_bytes() for name in _TEMPLATE_FILES for file in sorted(Path(folder).glob(name))]
    config = Path(folder) / "tokenizer_config.json"
    if not config.is_file() or b'"added_tokens_decoder"' not in config.read_bytes():
        texts += [file.read_bytes() for file in (Path(folder) / name for name in _TOKEN_FILES) if file.is_file()]
    return f"template {hashlib.sha256(b''.join(texts)).hexdigest()}"


def _read(template: str) -> str:
    try:
        return Path(template).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"data.chat.template = {template!r} cannot be read: {error}; give a file with a template in Jinja, or "
            f"{PLAIN!r}"
        ) from error
