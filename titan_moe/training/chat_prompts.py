"""Conversations as prompts: rendered by the tokenizer's chat template, up to where the model answers."""

from collections.abc import Sequence
from typing import NamedTuple

from titan_moe.config import Recipe, RecipeError
from titan_moe.data.chat.records import ANSWERING, Conversation
from titan_moe.data.chat.template import ChatTemplate
from titan_moe.data.tokenizer import Tokenizer

_ANSWER = "an answer"


class ChatPrompts(NamedTuple):
    """What a model goes on with."""

    texts: list[str]
    ids: list[list[int]]
    end_tokens: set[int]
    """With which an answer ends."""


def render(recipe: Recipe, tokenizer: Tokenizer, conversations: Sequence[Conversation]) -> ChatPrompts:
    """Render conversations with `data.chat.template`, by default the tokenizer's own.

    Raises: RecipeError if there is no template, or it refuses one.
    """
    if not conversations:
        return ChatPrompts([], [], set())
    folder = recipe.data.tokenizer
    if folder in ("", "bytes"):
        raise RecipeError([f"--chat needs the chat template of a tokenizer's folder, and data.tokenizer = {folder!r}"])
    try:
        template = ChatTemplate(folder, recipe.data.chat.template, begins_with_bos=bool(tokenizer.encode("")))
        texts = [template.text(each, len(each.messages), has_prompt=True) for each in conversations]
        ids = [template.encode(text)[0] for text in texts]
        return ChatPrompts(texts, ids, {token for each in conversations for token in _ends(template, each)})
    except (ValueError, OSError, ImportError) as error:
        raise RecipeError([f"--chat: {error}"]) from error


def _ends(template: ChatTemplate, conversation: Conversation) -> list[int]:
    """The control token behind an answer, if the template has one there."""
    messages = [*conversation.messages, {"role": ANSWERING, "content": _ANSWER}]
    text = template.text(conversation._replace(messages=messages), len(messages))
    behind = text.rpartition(_ANSWER)[2].lstrip()
    return template.encode(behind)[0][:1] if behind.startswith(template.control_tokens) else []
