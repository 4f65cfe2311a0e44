"""Open the training and held-out samples of a recipe's `[data]`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from titan_moe.config import Recipe
from titan_moe.data import hub, text
from titan_moe.data.bad_rows import BadRows
from titan_moe.data.cache import Cache, describe_files
from titan_moe.data.chat.samples import split_conversations
from titan_moe.data.chat.source import describe_codes, open_conversation_corpus, open_conversation_stream
from titan_moe.data.chat.stream import ConversationStream
from titan_moe.data.corpus import Corpus, open_corpus, split_holdout, write_corpus
from titan_moe.data.samples import EpochSamples, IndexedSamples, Samples
from titan_moe.data.stream import StreamedSamples
from titan_moe.data.synthetic import SyntheticSamples
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.data.tokens import open_token_files


class Source(NamedTuple):
    """The training samples and the held-out samples of a run."""

    training: Samples
    validation: IndexedSamples
    fingerprint: Callable[[], str]
    """Describes the content of the data, wherever it lies. It may read some megabytes."""
    bad_rows: BadRows
    """Those that this process has found."""


def open_source(recipe: Recipe, tokenizer: Tokenizer, cache: Cache) -> Source:
    """Open the source of `data.source`.

    Raises: ValueError if too little is held out for validation or for the prompt of generated text.
    """
    if recipe.data.source == "datasets" and not recipe.data.path:
        raise ValueError(
            "data.path is empty; data.source = 'datasets' needs a hub name, a local folder, or a file type such as "
            "'json' with data.files"
        )
    if recipe.data.source == "synthetic":
        return _open_synthetic(recipe)
    if recipe.data.source == "datasets" and recipe.data.is_streamed:
        return _open_stream(recipe, tokenizer)
    bad_rows = BadRows(recipe.data.bad_rows)
    corpus = _open_corpus(recipe, tokenizer, cache, bad_rows)
    split = split_conversations if recipe.data.format == "chat" else split_holdout
    training, held_out = split(corpus, recipe.data.holdout_fraction, recipe.train.seq_len_tokens)
    if recipe.validation.every_steps > 0 and len(held_out) < recipe.validation.num_sequences:
        raise ValueError(
            f"validation.num_sequences = {recipe.validation.num_sequences}, but data.holdout_fraction = "
            f"{recipe.data.holdout_fraction} holds out {len(held_out)} sequences of {recipe.train.seq_len_tokens} "
            "tokens; raise data.holdout_fraction or lower validation.num_sequences"
        )
    if recipe.metrics.sample_tokens > 0 and len(held_out) == 0:
        raise ValueError(
            f"metrics.sample_tokens = {recipe.metrics.sample_tokens} needs a held-out prompt, but "
            f"data.holdout_fraction = {recipe.data.holdout_fraction} holds out no sequence of "
            f"{recipe.train.seq_len_tokens} tokens; raise data.holdout_fraction, or set sample_tokens = 0"
        )
    epochs = EpochSamples(training, recipe.run.seed, recipe.data.is_shuffled)
    return Source(epochs, held_out, corpus.fingerprint, bad_rows)


def open_for_evaluation(recipe: Recipe, tokenizer: Tokenizer, cache: Cache) -> Source:
    """The same with all samples as held-out ones, in the order of the files. Of a stream they are the first ones.

    Raises: ValueError if there is less than one sequence.
    """
    if recipe.data.source == "synthetic" or (recipe.data.source == "datasets" and recipe.data.is_streamed):
        return open_source(recipe, tokenizer, cache)
    bad_rows = BadRows(recipe.data.bad_rows)
    corpus = _open_corpus(recipe, tokenizer, cache, bad_rows)
    split = split_conversations if recipe.data.format == "chat" else split_holdout
    samples, _ = split(corpus, 0.0, recipe.train.seq_len_tokens)
    return Source(EpochSamples(samples, 0, is_shuffled=False), samples, corpus.fingerprint, bad_rows)


def _open_synthetic(recipe: Recipe) -> Source:
    vocab_size, seq_len, seed = recipe.model.vocab_size, recipe.train.seq_len_tokens, recipe.run.seed
    held_out = SyntheticSamples(vocab_size, seq_len, seed, is_validation=True)
    count = recipe.validation.num_sequences
    training = SyntheticSamples(vocab_size, seq_len, seed)
    validation = held_out.take(0, count, range(count))
    return Source(training, validation, lambda: f"{vocab_size} synthetic ids, seed {seed}", BadRows())


def _open_stream(recipe: Recipe, tokenizer: Tokenizer) -> Source:
    """Open a streamed dataset. Its length is unknown, so validation uses its first documents instead of the last."""
    if recipe.data.holdout_fraction > 0:
        raise ValueError(
            f"data.holdout_fraction = {recipe.data.holdout_fraction} holds out the last documents, but the length of "
            "a stream is unknown; set it to 0 (validation then uses the stream's first documents) or set "
            "data.is_streamed to false"
        )

    bad_rows, made = BadRows(recipe.data.bad_rows), ""
    open_samples: Callable[..., StreamedSamples | ConversationStream]
    open_samples = partial(StreamedSamples, partial(hub.open_stream, recipe.data, bad_rows), tokenizer)
    if recipe.data.format == "chat":
        open_samples, made = open_conversation_stream(recipe, tokenizer, bad_rows), f"{describe_codes(recipe)}, "
    is_held_out_read = recipe.validation.every_steps > 0 or recipe.metrics.sample_tokens > 0
    count = recipe.validation.num_sequences if is_held_out_read else 0
    held_out = open_samples(recipe.train.seq_len_tokens)
    validation = held_out.take(0, count, range(count))
    if held_out.epoch > 0:
        raise ValueError(
            f"validation.num_sequences = {count} sequences of {recipe.train.seq_len_tokens} tokens use up all of "
            f"data.path = {recipe.data.path!r}, which is streamed; lower validation.num_sequences"
        )
    num_reserved = held_out.num_documents_touched if count else 0
    training = open_samples(recipe.train.seq_len_tokens, num_reserved)

    def fingerprint() -> str:
        held_out = f"the first {num_reserved} documents held out"
        return f"{hub.fingerprint(recipe.data)}, tokenizer {tokenizer.fingerprint}, {made}{held_out}"

    return Source(training, validation, fingerprint, bad_rows)


def _open_corpus(recipe: Recipe, tokenizer: Tokenizer, cache: Cache, bad_rows: BadRows) -> Corpus:
    data = recipe.data
    if data.format == "chat":
        return open_conversation_corpus(recipe, tokenizer, cache, bad_rows)
    if data.source == "tokens":
        return open_token_files(data, tokenizer, cache, bad_rows)
    files = text.find_text_files(data.path) if data.source == "text" else []
    made_from = describe_files(files) if data.source == "text" else hub.describe_dataset(data)

    def build(folder: Path) -> None:
        documents = text.read_documents(files) if data.source == "text" else hub.read_documents(data, bad_rows)
        write_corpus(folder, tokenizer.encode_documents(documents), tokenizer.dtype)

    open_ = partial(open_corpus, dtype=tokenizer.dtype, vocab_size=tokenizer.vocab_size)
    return cache.get(data.source, [made_from, tokenizer.fingerprint], build, open_)
