"""Prompts of `titan-moe generate`: one of the command line, or those of a file. Does not import torch."""

import json
from pathlib import Path

from titan_moe.config import RecipeError
from titan_moe.data.chat.records import ANSWERING, Conversation, RecordError, read_conversation


def read_prompts(prompt: str | None, file: str | None, *, is_chat: bool = False) -> list[str] | list[Conversation]:
    """One prompt, or those of a file: a line each, or JSON lines with a field `prompt`. Of a chat, conversations.

    Raises: RecipeError if there is none, or a line cannot be read.
    """
    if (prompt is None) == (file is None):
        raise RecipeError(["generate needs one of a prompt and --prompts FILE"])
    if file is None:
        return [Conversation([{"role": "user", "content": prompt}])] if is_chat else [prompt or ""]
    if is_chat:
        return _read_chats(Path(file).expanduser())
    try:
        lines = (
            Path(file).expanduser().read_text(encoding="utf-8").split("\n")
        )  # and at nothing else that may end a line
        lines = [line for line in lines if line.strip()]
        prompts = [json.loads(line)["prompt"] for line in lines] if file.endswith((".jsonl", ".json")) else lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError([f"--prompts {file} cannot be read: {type(error).__name__}: {error}"]) from error
    if not prompts or not all(isinstance(text, str) for text in prompts):
        raise RecipeError([f"--prompts {file} has no prompts, or one that is no text"])
    return prompts


def _read_chats(file: Path) -> list[Conversation]:
    """The conversations of JSON lines, or the one of a `.json` file, which may be a list of messages. What a user says
    may be a `prompt`. An answer at the end is left out.

    Raises: RecipeError for what is none.
    """
    try:
        text = file.read_text(encoding="utf-8")
        is_one = file.suffix == ".json"
        rows = [json.loads(text)] if is_one else [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise RecipeError([f"--prompts {file} cannot be read: {type(error).__name__}: {error}"]) from error
    chats = []
    for number, row in enumerate(rows, 1):
        row = {"messages": row} if isinstance(row, list) else row
        if isinstance(row, dict) and isinstance(row.get("prompt"), str) and row.get("completion") is None:
            row = {**row, "completion": ""}
        try:
            chat = read_conversation(row)
        except RecordError as error:
            where = f"{file}" if is_one else f"line {number} of {file}"
            raise RecipeError([f"--prompts: {where} {error}"]) from error
        messages = chat.messages[: -1 if chat.messages[-1]["role"] == ANSWERING else None]
        if not messages:
            raise RecipeError([f"--prompts: {file} has a conversation with nothing to answer"])
        chats.append(chat._replace(messages=messages))
    if not chats:
        raise RecipeError([f"--prompts {file} has no conversations"])
    return chats
