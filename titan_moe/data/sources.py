"""Open the training and held-out samples of a recipe's `[data]`."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from titan_moe.config import Recipe
from titan_moe.config.mixture import of_source
from titan_moe.config.schema import Table
from titan_moe.data import hub
from titan_moe.data.bad_rows import BadRows
from titan_moe.data.cache import Cache
from titan_moe.data.chat.source import describe_codes, open_conversation_stream
from titan_moe.data.chat.stream import ConversationStream
from titan_moe.data.corpora import Divided, open_divided
from titan_moe.data.corpus import Corpus
from titan_moe.data.documents import open_documents, resolve
from titan_moe.data.lanes.source import open_lanes
from titan_moe.data.lanes.worker import WorkerSamples
from titan_moe.data.mixture import MixedSamples, temper
from titan_moe.data.samples import EpochSamples, IndexedSamples, Samples
from titan_moe.data.stream import StreamedSamples
from titan_moe.data.synthetic import SyntheticSamples
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.data.validation import ChainedSamples, open_validation

logger = logging.getLogger(__name__)


class SourceSize(NamedTuple):
    """How much data a source of a mixture has, and how it is read."""

    name: str
    num_tokens: int
    """With what is held out."""
    share: float
    """Of the sequences of a run."""
    samples_per_epoch: int


MOST_HELD_OUT = 0.5
"""The largest share that is proposed to be held out."""


class DataSize(NamedTuple):
    """How much data a run has; None where that is unknown before it is read."""

    num_tokens: int | None = None
    """With what is held out."""
    num_documents: int | None = None
    held_out_tokens: int = 0
    held_out_documents: int | None = None
    sources: tuple[SourceSize, ...] = ()
    """Of a mixture."""


class Source(NamedTuple):
    """The training samples and the held-out samples of a run."""

    training: Samples
    validation: IndexedSamples
    fingerprint: Callable[[], str]
    """Describes the content of the data, wherever it lies. It may read some megabytes."""
    bad_rows: BadRows
    """Those that this process has found."""
    validation_sets: Mapping[str, IndexedSamples] = MappingProxyType({})
    """By the names of `validation.sets`."""
    size: DataSize = DataSize()


def open_source(recipe: Recipe, tokenizer: Tokenizer, cache: Cache) -> Source:
    """Open the source of `data.source`, and the data that validation has of its own.

    Raises: ValueError if too little is held out for validation or for the prompt of generated text.
    """
    if recipe.data.source == "datasets" and not recipe.data.path:
        raise ValueError(
            "data.path is empty; data.source = 'datasets' needs a hub name, a local folder, or a file type such as "
            "'json' with data.files"
        )
    if recipe.data.source == "synthetic":
        return _open_synthetic(recipe)
    source = _open_stream(recipe, tokenizer) if recipe.data.streams else _open_epochs(recipe, tokenizer, cache)
    if not recipe.validation.has_own_data or not _reads_held_out(recipe):
        return source
    own, sets = open_validation(recipe, tokenizer, cache)
    return source._replace(validation=own or source.validation, validation_sets=sets)


def _reads_held_out(recipe: Recipe) -> bool:
    return recipe.validation.every_steps > 0 or recipe.metrics.sample_tokens > 0


def _open_epochs(recipe: Recipe, tokenizer: Tokenizer, cache: Cache) -> Source:
    """Open data of a known size: one source, or several of a mixture."""
    bad_rows = BadRows(recipe.data.bad_rows)
    opened = _open_each(recipe, tokenizer, cache, bad_rows, recipe.data.holdout_fraction)
    held_out = _chained([held_out for _, _, held_out in opened.values()])
    has_own = recipe.validation.has_own_data and recipe.data.holdout_fraction == 0
    if recipe.validation.every_steps > 0 and not has_own and len(held_out) < recipe.validation.num_sequences:
        total = sum(corpus.num_tokens for corpus, _, _ in opened.values())
        raise ValueError(
            f"validation.num_sequences = {recipe.validation.num_sequences}, but data.holdout_fraction = "
            f"{recipe.data.holdout_fraction} holds out {len(held_out)} sequences of {recipe.train.seq_len_tokens} "
            f"tokens; {_way_to_validate(recipe, len(held_out), total)}"
        )
    if recipe.metrics.sample_tokens > 0 and not has_own and len(held_out) == 0:
        raise ValueError(
            f"metrics.sample_tokens = {recipe.metrics.sample_tokens} needs a held-out prompt, but "
            f"data.holdout_fraction = {recipe.data.holdout_fraction} holds out no sequence of "
            f"{recipe.train.seq_len_tokens} tokens; raise data.holdout_fraction, or set sample_tokens = 0"
        )
    epochs = {
        name: EpochSamples(training, recipe.run.seed, recipe.data.is_shuffled)
        for name, (_, training, _) in opened.items()
    }
    training, size = _mixed(recipe, opened, epochs)
    return Source(training, held_out, partial(_fingerprint, opened), bad_rows, size=size)


def _open_each(
    recipe: Recipe, tokenizer: Tokenizer, cache: Cache, bad_rows: BadRows, holdout_fraction: float
) -> dict[str, Divided]:
    """Open each source of a mixture, or the only one, whose name is empty.

    Raises: ValueError or ImportError naming the source, and the field of it to change.
    """
    opened = {}
    for name, data in recipe.data.by_source().items():
        try:
            opened[name] = open_divided(
                replace(recipe, data=data), tokenizer, cache, bad_rows.of_source(name), holdout_fraction
            )
        except (ValueError, FileNotFoundError, ImportError) as error:
            if not name:
                raise
            kind = ImportError if isinstance(error, ImportError) else ValueError
            raise kind(of_source(name, str(error))) from error
    return opened


def _chained(parts: list[IndexedSamples]) -> IndexedSamples:
    return parts[0] if len(parts) == 1 else ChainedSamples(parts)


def _mixed(
    recipe: Recipe, opened: Mapping[str, Divided], epochs: Mapping[str, EpochSamples]
) -> tuple[Samples, DataSize]:
    """The training samples of all sources, and how many there are."""
    data, sizes = recipe.data, [_size_of(corpus, held_out.num_tokens) for corpus, _, held_out in opened.values()]
    if data.source != "mixture":
        return next(iter(epochs.values())), sizes[0]
    num_tokens = [training.num_tokens for _, training, _ in opened.values()]
    given = [source.weight for source in data.mixture]
    weights = temper(num_tokens, data.mixture_temperature) if data.mixture_temperature > 0 else given
    mixed = MixedSamples(epochs, weights, recipe.checkpoint.accept_changed_data)
    sources = tuple(
        SourceSize(name, size.num_tokens or 0, mixed.shares[name], samples.samples_per_epoch)
        for (name, samples), size in zip(epochs.items(), sizes, strict=True)
    )
    columns = [[number for number in column if number is not None] for column in list(zip(*sizes, strict=True))[:4]]
    sums = [sum(column) if len(column) == len(sizes) else None for column in columns]
    return mixed, DataSize(sums[0], sums[1], sums[2] or 0, sums[3], sources)


def _fingerprint(opened: Mapping[str, Divided]) -> str:
    """Describe the content of each source; weights do not matter."""
    found = {name: corpus.fingerprint() for name, (corpus, _, _) in sorted(opened.items())}
    return "; ".join(f"{name}: {content}" if name else content for name, content in found.items())


def _way_to_validate(recipe: Recipe, num_held_out: int, num_tokens: int) -> str:
    """What gives enough sequences for validation, or asks for fewer."""
    wanted, micro, ways = recipe.validation.num_sequences, recipe.train.micro_batch_sequences, list[str]()
    for number in (wanted, micro):
        share = math.ceil(100 * (number + 1) * recipe.train.seq_len_tokens / max(num_tokens, 1)) / 100
        if share <= MOST_HELD_OUT:
            fewer = f" with validation.num_sequences = {number}" if number < wanted else ""
            ways.append(f"data.holdout_fraction = {share:g}{fewer} is enough")
            break
    if fewer_sequences := num_held_out // micro * micro:
        ways.append(f"take validation.num_sequences = {fewer_sequences} on one rank")
    ways.append("give validation data of its own, validation.path with data.holdout_fraction = 0")
    return ", or ".join(ways)


def _size_of(corpus: Corpus, held_out_tokens: int) -> DataSize:
    if not corpus.knows_documents:
        return DataSize(corpus.num_tokens, None, held_out_tokens)
    ends = corpus.document_ends
    num_held_out = len(ends) - int(np.searchsorted(ends, corpus.num_tokens - held_out_tokens, side="right"))
    return DataSize(corpus.num_tokens, len(ends), held_out_tokens, num_held_out)


def open_for_evaluation(recipe: Recipe, tokenizer: Tokenizer, cache: Cache) -> Source:
    """The same with all samples as held-out ones, in the order of the files. Of a stream they are the first ones. What
    validation has of its own is not read.

    Raises: ValueError if there is less than one sequence.
    """
    if recipe.data.source == "synthetic" or recipe.data.streams:
        without = replace(recipe.validation, path="", sets=Table())
        return open_source(replace(recipe, validation=without), tokenizer, cache)
    bad_rows = BadRows(recipe.data.bad_rows)
    opened = _open_each(recipe, tokenizer, cache, bad_rows, 0.0)
    samples = _chained([training for _, training, _ in opened.values()])
    return Source(EpochSamples(samples, 0, is_shuffled=False), samples, partial(_fingerprint, opened), bad_rows)


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
    data, found = resolve(recipe.data)
    open_samples: Callable[..., StreamedSamples | ConversationStream]
    open_samples = partial(StreamedSamples, partial(open_documents, data, found, bad_rows), tokenizer)
    if data.format == "chat":
        open_samples, made = open_conversation_stream(recipe, tokenizer, bad_rows), f"{describe_codes(recipe)}, "
    is_held_out_read = _reads_held_out(recipe) and not recipe.validation.has_own_data
    count = recipe.validation.num_sequences if is_held_out_read else 0
    held_out = open_samples(recipe.train.seq_len_tokens)
    validation = held_out.take(0, count, range(count))
    if held_out.epoch > 0:
        raise ValueError(
            f"validation.num_sequences = {count} sequences of {recipe.train.seq_len_tokens} tokens use up all of "
            f"data.path = {recipe.data.path!r}, which is streamed; lower validation.num_sequences"
        )
    num_reserved = held_out.num_documents_touched if count else 0
    training: Samples = open_samples(recipe.train.seq_len_tokens, num_reserved)
    if data.stream_lanes > 0:
        training = open_lanes(recipe, tokenizer, bad_rows, num_reserved)
        fewer = "" if training.num_lanes == data.stream_lanes else "; ranks beyond them read the same ones"
        logger.info("data.stream_lanes = %d: the stream has %d%s", data.stream_lanes, training.num_lanes, fewer)
        if data.stream_has_worker:
            training = WorkerSamples(recipe, num_reserved, training, bad_rows)

    def fingerprint() -> str:
        held_out = f"the first {num_reserved} documents held out"
        return f"{hub.fingerprint(data, found.files)}, tokenizer {tokenizer.fingerprint}, {made}{held_out}"

    held_out_tokens = count * recipe.train.seq_len_tokens
    return Source(training, validation, fingerprint, bad_rows, size=DataSize(None, None, held_out_tokens, num_reserved))
