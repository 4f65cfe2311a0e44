"""Open the training and held-out samples of a recipe's `[data]`."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from titan_moe.config import Recipe
from titan_moe.config.mixture import NOT_READ, of_source
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
from titan_moe.data.mixture import MixedSamples, UnreadSamples, temper
from titan_moe.data.samples import EpochSamples, IndexedSamples, Samples
from titan_moe.data.stream import StreamedSamples
from titan_moe.data.synthetic import SyntheticSamples
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.data.validation import ChainedSamples, open_validation

logger = logging.getLogger(__name__)


class SourceSize(NamedTuple):
    """How much data a source of a mixture has, and how it is read."""

    name: str
    num_tokens: int | None
    """With what is held out; None where that is unknown."""
    share: float
    """Of the sequences of a run."""
    samples_per_epoch: int
    """0 where that is unknown."""


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
    """Open data of a known size, or a mixture."""
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
    fingerprint = partial(_fingerprint, recipe, opened, tokenizer)
    if recipe.data.source != "mixture":
        ((corpus, training, own_held_out),) = opened.values()
        size = _size_of(corpus, own_held_out.num_tokens)
        return Source(_in_epochs(recipe, training), held_out, fingerprint, bad_rows, size=size)
    mixed = _mix(recipe, opened, tokenizer, bad_rows)
    size = _size_of_mixture(mixed, opened)
    if not mixed.is_divided or not recipe.data.stream_has_worker:
        return Source(mixed, held_out, fingerprint, bad_rows, size=size)
    open_again = partial(open_mixture, cache_folder=cache.folder)
    return Source(WorkerSamples(recipe, open_again, mixed, bad_rows), held_out, fingerprint, bad_rows, size=size)


def open_mixture(recipe: Recipe, tokenizer: Tokenizer, bad_rows: BadRows, cache_folder: Path) -> MixedSamples:
    """Open the samples of a mixture whose data is in the cache."""
    cache = Cache(cache_folder, is_builder=False, barrier=lambda: None)
    opened = _open_each(recipe, tokenizer, cache, bad_rows, recipe.data.holdout_fraction)
    return _mix(recipe, opened, tokenizer, bad_rows)


def _in_epochs(recipe: Recipe, training: IndexedSamples) -> EpochSamples:
    return EpochSamples(training, recipe.run.seed, recipe.data.is_shuffled)


def _open_each(
    recipe: Recipe, tokenizer: Tokenizer, cache: Cache, bad_rows: BadRows, holdout_fraction: float
) -> dict[str, Divided]:
    """Open each source of a mixture that is read and no stream, or the only one, whose name is empty.

    Raises: ValueError or ImportError naming the source, and the field of it to change.
    """
    unread, opened = _unread(recipe), {}
    for name, data in recipe.data.by_source().items():
        if name not in unread and not data.streams:
            with _as_problem_of(name):
                own = replace(recipe, data=data)
                opened[name] = open_divided(own, tokenizer, cache, bad_rows.of_source(name), holdout_fraction)
    return opened


@contextmanager
def _as_problem_of(name: str) -> Iterator[None]:
    """Let errors name the source."""
    try:
        yield
    except (ValueError, FileNotFoundError, ImportError) as error:
        if not name:
            raise
        kind = ImportError if isinstance(error, ImportError) else ValueError
        raise kind(of_source(name, str(error))) from error


def _unread(recipe: Recipe) -> set[str]:
    """The sources of a mixture that have no share."""
    return {source.label for source in recipe.data.mixture if source.weight == 0}


def _chained(parts: list[IndexedSamples]) -> IndexedSamples:
    return parts[0] if len(parts) == 1 else ChainedSamples(parts)


def _mix(recipe: Recipe, opened: Mapping[str, Divided], tokenizer: Tokenizer, bad_rows: BadRows) -> MixedSamples:
    """The training samples of all sources.

    Raises: ValueError or ImportError naming the source, and the field of it to change.
    """
    data, unread, sources = recipe.data, _unread(recipe), dict[str, Samples]()
    for name, own in data.by_source().items():
        if name in opened:
            sources[name] = _in_epochs(recipe, opened[name][1])
        elif name in unread:
            sources[name] = UnreadSamples()
        else:
            with _as_problem_of(name):
                sources[name] = _open_training(replace(recipe, data=own), tokenizer, bad_rows.of_source(name), 0)
    weights = [source.weight for source in data.mixture]
    if data.mixture_temperature > 0:
        weights = temper([training.num_tokens for _, training, _ in opened.values()], data.mixture_temperature)
    return MixedSamples(sources, weights, recipe.checkpoint.accept_changed_data)


def _size_of_mixture(mixed: MixedSamples, opened: Mapping[str, Divided]) -> DataSize:
    """Of all sources, where each is of a known size, and of each."""
    sizes = {name: _size_of(corpus, held_out.num_tokens) for name, (corpus, _, held_out) in opened.items()}
    read = [name for name, share in mixed.shares.items() if share > 0]
    sources = tuple(
        SourceSize(name, sizes.get(name, DataSize()).num_tokens, share, mixed.samples_per_epoch_of(name))
        for name, share in mixed.shares.items()
    )
    columns = list(zip(*(sizes.get(name, DataSize())[:4] for name in read), strict=True))
    tokens, documents, held_out, held_out_documents = (
        None if None in column else sum(number or 0 for number in column) for column in columns
    )
    return DataSize(tokens, documents, held_out or 0, held_out_documents, sources)


def _fingerprint(recipe: Recipe, opened: Mapping[str, Divided], tokenizer: Tokenizer) -> str:
    """Describe the content of each source; weights do not matter, but that a source of weight 0 is not opened."""
    found, unread = {name: corpus.fingerprint() for name, (corpus, _, _) in opened.items()}, _unread(recipe)
    for name, data in recipe.data.by_source().items():
        if name in unread:
            found[name] = NOT_READ
        elif name not in opened:
            found[name] = _fingerprint_of_stream(replace(recipe, data=data), tokenizer)
    return "; ".join(f"{name}: {content}" if name else content for name, content in sorted(found.items()))


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
    if recipe.data.mixes_streams:
        raise ValueError(
            "data.mixture has a source that is streamed, of which nothing is held out; name data to evaluate, "
            "--data.path=..., or set its is_streamed to false"
        )
    bad_rows = BadRows(recipe.data.bad_rows)
    opened = _open_each(recipe, tokenizer, cache, bad_rows, 0.0)
    samples = _chained([training for _, training, _ in opened.values()])
    fingerprint = partial(_fingerprint, recipe, opened, tokenizer)
    return Source(EpochSamples(samples, 0, is_shuffled=False), samples, fingerprint, bad_rows)


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

    bad_rows = BadRows(recipe.data.bad_rows)
    is_held_out_read = _reads_held_out(recipe) and not recipe.validation.has_own_data
    count = recipe.validation.num_sequences if is_held_out_read else 0
    held_out = _opener(recipe, tokenizer, bad_rows)(recipe.train.seq_len_tokens)
    validation = held_out.take(0, count, range(count))
    if held_out.epoch > 0:
        raise ValueError(
            f"validation.num_sequences = {count} sequences of {recipe.train.seq_len_tokens} tokens use up all of "
            f"data.path = {recipe.data.path!r}, which is streamed; lower validation.num_sequences"
        )
    num_reserved = held_out.num_documents_touched if count else 0
    training = _open_training(recipe, tokenizer, bad_rows, num_reserved)
    if training.is_divided and recipe.data.stream_has_worker:
        training = WorkerSamples(recipe, partial(open_lanes, num_reserved=num_reserved), training, bad_rows)

    def fingerprint() -> str:
        return f"{_fingerprint_of_stream(recipe, tokenizer)}the first {num_reserved} documents held out"

    held_out_tokens = count * recipe.train.seq_len_tokens
    return Source(training, validation, fingerprint, bad_rows, size=DataSize(None, None, held_out_tokens, num_reserved))


def _opener(
    recipe: Recipe, tokenizer: Tokenizer, bad_rows: BadRows
) -> Callable[..., StreamedSamples | ConversationStream]:
    """Opens a stream that is read as a whole: of `(seq_len_tokens)` for validation, of `(seq_len_tokens, num_reserved)`
    for training."""
    if recipe.data.format == "chat":
        return open_conversation_stream(recipe, tokenizer, bad_rows)
    return partial(StreamedSamples, partial(open_documents, *resolve(recipe.data), bad_rows), tokenizer)


def _open_training(recipe: Recipe, tokenizer: Tokenizer, bad_rows: BadRows, num_reserved: int) -> Samples:
    """Open a stream for training, in lanes if the recipe has any."""
    data = recipe.data
    if data.stream_lanes == 0:
        return _opener(recipe, tokenizer, bad_rows)(recipe.train.seq_len_tokens, num_reserved)
    training = open_lanes(recipe, tokenizer, bad_rows, num_reserved)
    fewer = "" if training.num_lanes == data.stream_lanes else "; ranks beyond them read the same ones"
    words = "data.stream_lanes = %d: the stream %s has %d%s"
    logger.info(words, data.stream_lanes, data.files or data.path, training.num_lanes, fewer)
    return training


def _fingerprint_of_stream(recipe: Recipe, tokenizer: Tokenizer) -> str:
    """Describe the content of a stream and what makes tokens of it."""
    data, found = resolve(recipe.data)
    made = f"{describe_codes(recipe)}, " if data.format == "chat" else ""
    return f"{hub.fingerprint(data, found.files)}, tokenizer {tokenizer.fingerprint}, {made}"
