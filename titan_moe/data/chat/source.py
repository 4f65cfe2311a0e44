"""Open the conversations of a recipe's `[data]`: tokenised once into the cache, or streamed."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from titan_moe.config import Recipe
from titan_moe.data.bad_rows import BadRows
from titan_moe.data.cache import Cache
from titan_moe.data.chat.encoder import ConversationEncoder
from titan_moe.data.chat.samples import open_conversations, write_conversations
from titan_moe.data.chat.stream import ConversationStream
from titan_moe.data.chat.template import ChatTemplate, fingerprint
from titan_moe.data.chat.whole import WINDOW_SEQUENCES
from titan_moe.data.corpus import Corpus
from titan_moe.data.documents import describe_rows, open_documents, resolve
from titan_moe.data.row_text import RowTexts
from titan_moe.data.stream import Documents
from titan_moe.data.tokenising import reported
from titan_moe.data.tokenizer import Tokenizer

VERSION = 2
"""Of what is learned of a row: an entry of the cache of another one is not read."""

logger = logging.getLogger(__name__)


def open_conversation_corpus(recipe: Recipe, tokenizer: Tokenizer, cache: Cache, bad_rows: BadRows) -> Corpus:
    """Tokenise the conversations of a recipe, unless they are in the cache. Its tokens are codes. The log says how many
    there are, and what was left out.

    Raises: ValueError or ImportError, each naming the field of `[data]` to change.
    """

    data, found = resolve(recipe.data)

    def build(folder: Path) -> None:
        encoder = open_encoder(recipe, tokenizer, bad_rows)
        rows = open_documents(data, found, bad_rows, 0, None, encoder.encode)
        share = (lambda: rows.share) if isinstance(rows, RowTexts) else None
        write_conversations(folder, reported(_read_all(rows), share), encoder.counts)

    key = [describe_rows(data, found, cache), tokenizer.fingerprint, describe_codes(recipe), VERSION]
    open_ = partial(open_conversations, vocab_size=recipe.model.vocab_size)
    corpus, counts = cache.get("chat", key, build, open_)
    logger.info("%s has %s", data.files or data.path, counts.describe())
    return corpus


def open_conversation_stream(
    recipe: Recipe, tokenizer: Tokenizer, bad_rows: BadRows
) -> Callable[..., ConversationStream]:
    """Open streams of a recipe's conversations: of `(seq_len_tokens)` for validation, which reads no more than it
    needs, of `(seq_len_tokens, num_reserved)` for training.

    Raises: ValueError or ImportError, each naming the field of `[data]` to change.
    """
    encoder = open_encoder(recipe, tokenizer, bad_rows)
    open_codes = partial(open_documents, *resolve(recipe.data), bad_rows, convert=encoder.encode)

    def open_(seq_len_tokens: int, num_reserved: int | None = None) -> ConversationStream:
        window = recipe.validation.num_sequences if num_reserved is None else WINDOW_SEQUENCES
        return ConversationStream(open_codes, seq_len_tokens, num_reserved or 0, window)

    return open_


def describe_codes(recipe: Recipe) -> str:
    """Describe how rows become codes, for cache keys and fingerprints."""
    data, chat = recipe.data, recipe.data.chat
    template = fingerprint(data.tokenizer, chat.template)
    max_tokens = recipe.train.seq_len_tokens + 1
    return f"{template}, answers {chat.answers}, {chat.train_on} learned, {chat.too_long} above {max_tokens} tokens"


def _read_all(rows: Documents) -> Iterator[np.ndarray]:
    while (codes := rows.read()) is not None:
        yield codes


def open_encoder(recipe: Recipe, tokenizer: Tokenizer, bad_rows: BadRows) -> ConversationEncoder:
    """What makes codes of the rows of a recipe.

    Raises: ValueError or ImportError, each naming the field of `[data]` to change.
    """
    data, vocab_size = recipe.data, recipe.model.vocab_size
    template = ChatTemplate(data.tokenizer, data.chat.template, begins_with_bos=bool(tokenizer.encode("")))
    if template.vocab_size > vocab_size:
        raise ValueError(
            f"data.tokenizer = {data.tokenizer!r} has {template.vocab_size} ids for transformers, more than "
            f"model.vocab_size = {vocab_size}; set model.vocab_size to at least {template.vocab_size}"
        )
    if template.has_date and data.is_streamed:
        raise ValueError(
            "data.is_streamed = true, but the chat template writes the date (strftime_now): a run that goes on another "
            "day would have other tokens; set data.is_streamed = false, or data.chat.template to a copy without it"
        )
    return ConversationEncoder(template, data.chat, recipe.train.seq_len_tokens + 1, bad_rows)
