"""Read a row of data as a conversation, in the forms in which they are published."""

import json
from typing import Any, NamedTuple

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "function",
    "observation": "tool",
    "ipython": "ipython",
}
"""A role as data has it -> as templates have it."""
ANSWERING = "assistant"
_KEYS = "messages, conversations, or prompt and completion"


class RecordError(ValueError):
    """A row cannot be trained on as a conversation. The text goes on after the row's place."""


class Conversation(NamedTuple):
    """What a template renders."""

    messages: list[dict[str, Any]]
    num_prompt: int = 0
    """The messages at its start of which no token is an answer."""
    tools: list[Any] | None = None
    options: dict[str, Any] = {}
    """More variables of the template."""

    @property
    def answers(self) -> list[int]:
        """The numbers of the messages that are answers, from 0. One with `weight` 0 is none."""
        numbers = self.of_assistant
        return [number for number in numbers if number >= self.num_prompt and self.messages[number].get("weight", 1)]

    @property
    def of_assistant(self) -> list[int]:
        """The numbers of all messages of the assistant."""
        return [number for number, message in enumerate(self.messages) if message["role"] == ANSWERING]


def read_conversation(row: Any) -> Conversation:
    """Make a conversation of a row.

    Raises: RecordError for a row without messages, or with one that has no role or no text.
    """
    if not isinstance(row, dict):
        raise RecordError(f"is {type(row).__name__}, not an object with {_KEYS}")
    messages, num_prompt = _messages(row)
    if (system := row.get("system")) is not None:
        if not isinstance(system, str):
            raise RecordError("has a `system` that is no text")
        if system and messages[0]["role"] != "system":
            messages, num_prompt = [{"role": "system", "content": system}, *messages], num_prompt + (num_prompt > 0)
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise RecordError("has `chat_template_kwargs` that are no object")
    return Conversation(messages, num_prompt, _tools(row.get("tools")), _without_nulls(options))


def _messages(row: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The messages of a row, and how many of them are its prompt."""
    for key in ("messages", "conversations"):
        if row.get(key) is not None:
            return _read_list(row[key], key), 0
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is None or completion is None:
        raise RecordError(f"has the keys {', '.join(map(repr, row)) or '(none)'}, but not {_KEYS}")
    if isinstance(prompt, str) and isinstance(completion, str):
        return [{"role": "user", "content": prompt}, {"role": ANSWERING, "content": completion}], 1
    if isinstance(prompt, str) or isinstance(completion, str):
        raise RecordError(
            "has a text and a list as `prompt` and `completion`; both must be texts, or lists of messages"
        )
    read = _read_list(prompt, "prompt")
    return read + _read_list(completion, "completion"), len(read)


def _read_list(messages: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RecordError(f"has no list of messages in {key!r}")
    return [_read_message(message, f"message {number} of {key!r}") for number, message in enumerate(messages, start=1)]


def _read_message(message: Any, name: str) -> dict[str, Any]:
    """A message with `role` and `content`, and its other keys that have a value."""
    if not isinstance(message, dict):
        raise RecordError(f"has {type(message).__name__} as {name}, not an object with role and content")
    rest = _without_nulls(message)
    role = rest.pop("role", None) or rest.pop("from", None)
    content = rest.pop("content" if "content" in rest or "value" not in rest else "value", None)
    if not isinstance(role, str) or role not in ROLES:
        problem = "no role" if role is None else f"the role {role!r}"
        raise RecordError(f"has {problem} in {name}; known are {', '.join(ROLES)}")
    if rest.get("weight", 1) not in (0, 1):
        raise RecordError(f"has the weight {rest['weight']!r} in {name}; known are 0, which is not learned, and 1")
    if content is None:
        if not rest.get("tool_calls"):
            raise RecordError(f"has no content in {name}")
        return {"role": ROLES[role], **rest}
    return {"role": ROLES[role], "content": _text(content, name), **rest}


def _text(content: Any, name: str) -> str:
    """The text of a content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    found = [part.get("text") if isinstance(part, dict) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise RecordError(f"has a content that is no text in {name}")
    return "".join(texts)


def _tools(tools: Any) -> list[Any] | None:
    """The descriptions of tools, which may be JSON in a string, whose nulls remain."""
    is_exact = isinstance(tools, str)
    if is_exact and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RecordError(f"has `tools` that are not JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError("has `tools` that are no list of objects")
    return tools if is_exact else _without_nulls(tools)


def _without_nulls(value: Any) -> Any:
    """Without the keys of objects that have no value. In a table every row has the keys of all others."""
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return value
