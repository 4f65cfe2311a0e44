"""Make a corpus of a source: tokenise its documents once, and keep the tokens in the cache."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from titan_moe.config import Recipe
from titan_moe.config.data_files import ROWS, Found
from titan_moe.config.train import DataConfig
from titan_moe.data import hub, text
from titan_moe.data.bad_rows import BadRows
from titan_moe.data.cache import Cache
from titan_moe.data.chat.samples import WholeSamples, split_conversations
from titan_moe.data.chat.source import open_conversation_corpus
from titan_moe.data.corpus import Corpus, CorpusSamples, open_corpus, split_holdout, write_corpus
from titan_moe.data.documents import describe_content, describe_rows, resolve
from titan_moe.data.row_text import RowTexts
from titan_moe.data.tokenising import reported
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.data.tokens import open_token_files

Divided = tuple[Corpus, CorpusSamples | WholeSamples, CorpusSamples | WholeSamples]
OpenCorpus = Callable[[DataConfig, Found, Tokenizer, Cache, BadRows], Corpus]


def open_divided(
    recipe: Recipe, tokenizer: Tokenizer, cache: Cache, bad_rows: BadRows, holdout_fraction: float
) -> Divided:
    """Open the data of a recipe: all of it, and the samples for training and those held out.

    Raises: ValueError, FileNotFoundError or ImportError, each naming the field of `[data]` to change.
    """
    if recipe.data.format == "chat":
        corpus = open_conversation_corpus(recipe, tokenizer, cache, bad_rows)
        return corpus, *split_conversations(corpus, holdout_fraction, recipe.train.seq_len_tokens)
    corpus = open_corpus_of(recipe.data, tokenizer, cache, bad_rows)
    return corpus, *split_holdout(corpus, holdout_fraction, recipe.train.seq_len_tokens)


def open_corpus_of(data: DataConfig, tokenizer: Tokenizer, cache: Cache, bad_rows: BadRows) -> Corpus:
    """Open the data of a source as one corpus.

    Raises: ValueError, FileNotFoundError or ImportError, each naming the field of `[data]` to change.
    """
    data, found = resolve(data)
    return CORPORA[found.kind](data, found, tokenizer, cache, bad_rows)


def _of_texts(data: DataConfig, found: Found, tokenizer: Tokenizer, cache: Cache, bad_rows: BadRows) -> Corpus:
    files = found.files or text.find_text_files(data.path)
    sizes = [file.stat().st_size for file in files]
    num_read = 0

    def documents() -> Iterator[str]:
        nonlocal num_read
        for size, document in zip(sizes, text.read_documents(files), strict=True):
            num_read += size
            yield document

    def share() -> float:
        return num_read / max(sum(sizes), 1)

    return _tokenised("text", describe_content(files, cache), documents, share, tokenizer, cache)


def _of_rows(data: DataConfig, found: Found, tokenizer: Tokenizer, cache: Cache, bad_rows: BadRows) -> Corpus:
    texts = RowTexts(data, found.files, found.kind, bad_rows, 0, None)

    def share() -> float:
        return texts.share

    key = [texts.column, describe_rows(data, found, cache)]
    return _tokenised("rows", key, lambda: iter(texts.read, None), share, tokenizer, cache)


def _of_datasets(data: DataConfig, found: Found, tokenizer: Tokenizer, cache: Cache, bad_rows: BadRows) -> Corpus:
    documents = partial(hub.read_documents, data, bad_rows)
    return _tokenised("datasets", describe_rows(data, found, cache), documents, None, tokenizer, cache)


def _of_tokens(data: DataConfig, found: Found, tokenizer: Tokenizer, cache: Cache, bad_rows: BadRows) -> Corpus:
    return open_token_files(data, tokenizer, cache, bad_rows, found.files)


CORPORA: dict[str, OpenCorpus] = {
    "text": _of_texts,
    **dict.fromkeys(ROWS, _of_rows),
    "datasets": _of_datasets,
    "tokens": _of_tokens,
}
"""Kind of data -> opens it as a corpus."""


def _tokenised(
    name: str,
    made_from: object,
    documents: Callable[[], Iterator[str]],
    share: Callable[[], float] | None,
    tokenizer: Tokenizer,
    cache: Cache,
) -> Corpus:
    def build(folder: Path) -> None:
        write_corpus(folder, reported(tokenizer.encode_documents(documents()), share), tokenizer.dtype)

    open_ = partial(open_corpus, dtype=tokenizer.dtype, vocab_size=tokenizer.vocab_size)
    return cache.get(name, [made_from, tokenizer.fingerprint], build, open_)
