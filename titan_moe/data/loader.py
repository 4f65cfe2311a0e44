"""The data loader of one data-parallel rank.

Shapes: M microbatches · B sequences · N tokens of a sequence.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from titan_moe.config import Recipe
from titan_moe.config.context import WHOLE_SEQUENCES, SequenceShard
from titan_moe.data.cache import Cache, folder_of
from titan_moe.data.packing import IGNORE_LABEL, Batch, pack
from titan_moe.data.sample import Sample
from titan_moe.data.sources import Source, open_source
from titan_moe.data.tokenizer import Tokenizer, build_tokenizer

logger = logging.getLogger(__name__)


class Loader:
    """Read one rank's microbatches of every step. The state is one sample number, equal on all ranks.

    Step s uses samples [s*G, (s+1)*G) of the global order; with `train.batch_schedule` G grows. Rank r reads the r-th
    of dp_size equal contiguous slices, as M microbatches of B sequences. The state does not depend on the rank, so a
    run resumes on any number of ranks.
    """

    def __init__(
        self,
        recipe: Recipe,
        dp_rank: int,
        dp_size: int,
        tokenizer: Tokenizer,
        source: Source,
        shard: SequenceShard,
        gather: Callable[[str], list[str]] = lambda state: [state],
    ) -> None:
        """`gather` collects the texts of all ranks, for the state of data of which each rank knows its part."""
        self.tokenizer, self._gather = tokenizer, gather
        self._training, self._validation, self._fingerprint, self.bad_rows = source[:4]
        self._validation_sets = source.validation_sets
        self._recipe = recipe
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._shard = shard
        self._next_sample = 0
        self._position = self._read_position()
        self._ahead: deque[tuple[Batch, dict[str, Any]]] = deque()

    def next_step(self) -> Batch:
        """Return this rank's microbatches of the next optimizer step."""
        if not self._ahead:
            self.read_ahead()
        batch, self._position = self._ahead.popleft()
        return batch

    def read_ahead(self) -> None:
        """Read the batch of one more step, which `next_step` returns in its turn. The state remains the position before
        the first batch that `next_step` has not returned, also after an error."""
        num_global = self._recipe.train.batch_sizes.next(self._next_sample)
        num_mine = num_global // self._dp_size
        mine = range(self._dp_rank * num_mine, (self._dp_rank + 1) * num_mine)
        samples = self._training.take(self._next_sample, num_global, mine)
        self._next_sample += num_global
        self._ahead.append((self._pack(samples).shard(self._shard), self._read_position()))

    @property
    def validation_names(self) -> list[str]:
        """What is validated: `validation.sets`, after an empty name for what is held out or `validation.path`."""
        recipe = self._recipe
        is_of_sets = recipe.validation.sets and not recipe.validation.path and recipe.data.holdout_fraction == 0
        return [*([] if is_of_sets else [""]), *self._validation_sets]

    def num_validated(self, name: str = "") -> int:
        """The sequences that a validation reads of what is held out, or of a set."""
        held_out = self._validation_sets[name] if name else self._validation
        return min(self._recipe.validation.num_sequences, len(held_out))

    def validation_batches(self, name: str = "") -> Iterator[Batch]:
        """Yield this rank's held-out microbatches, of one of `validation_names`: the same at every call, equally many
        on every rank.

        `validation.num_sequences` sequences, evenly spaced over the held-out ones, are distributed over the ranks.
        Padding sequences have IGNORE_LABEL as every label.

        Raises: ValueError if no sequence is held out.
        """
        return (batch.shard(self._shard) for batch in self.held_out_batches(name))

    @property
    def epoch(self) -> float | None:
        """How many times the data is read by the steps so far: 1.5 in the middle of the second time. Of a stream the
        restarts; None for data without end."""
        return self._position["epoch"]

    @property
    def epochs(self) -> dict[str, float]:
        """The same of each source of a mixture."""
        epochs: dict[str, float] = self._position["epochs"]
        return epochs

    @property
    def samples_per_epoch(self) -> int:
        """Sequences of an epoch; 0 if they are unknown or without end."""
        return self._training.samples_per_epoch

    @property
    def num_held_out(self) -> int:
        """The sequences that are held out."""
        return len(self._validation)

    def held_out_batches(self, name: str = "") -> Iterator[Batch]:
        """The same of whole sequences, also where context-parallel ranks have parts of them."""
        held_out = self._validation_sets[name] if name else self._validation
        count = self.num_validated(name)
        if count == 0:
            raise ValueError(
                f"nothing is held out for validation: data.holdout_fraction = {self._recipe.data.holdout_fraction} "
                f"gives {len(self._validation)} sequences, and validation.num_sequences = "
                f"{self._recipe.validation.num_sequences}; increase the one that is too small"
            )
        size = self._recipe.train.micro_batch_sequences
        stride = self._dp_size * size
        for first in range(self._dp_rank * size, -(-count // stride) * stride, stride):
            numbers = range(first, min(first + size, count))
            samples = [held_out[number * len(held_out) // count] for number in numbers]
            num_tokens = self._recipe.train.seq_len_tokens + 1
            padding = Sample(np.zeros(num_tokens, dtype=np.int64), np.zeros(num_tokens, dtype=np.int32))
            batch = self._pack(samples + [padding] * (size - len(samples)))
            batch.labels_MBN[:, len(samples) :] = IGNORE_LABEL
            yield batch

    def held_out_prompt(self, num_tokens: int) -> Tensor:
        """The first tokens of this rank's first held-out sequence, int64 [1, num_tokens]; fewer if it is shorter."""
        return next(self.held_out_batches()).tokens_MBN[0, :1, :num_tokens]

    def fingerprint(self) -> str:
        """Describe the content of the data: equal for equal data in another place. It may read some megabytes."""
        return self._fingerprint()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data as integers and one string, equal on all ranks. Collective if ranks read
        their parts of a stream."""
        stream = self._position["stream"]
        if self._training.is_divided:
            stream = self._training.merge(self._gather(stream))
        return {"next_sample": self._position["next_sample"], **self._sizes(), "stream": stream}

    def _sizes(self) -> dict[str, int]:
        seq_len_tokens = self._recipe.train.seq_len_tokens
        return {"seq_len_tokens": seq_len_tokens, "samples_per_epoch": self._training.samples_per_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`, on any number of ranks.

        Raises: ValueError if the same sample number would refer to another sample.
        """
        own = self._sizes()
        ways_out = {
            "seq_len_tokens": "set train.seq_len_tokens back",
            "samples_per_epoch": "restore the corpus, tokenizer and holdout that it was trained on, set "
            "checkpoint.accept_changed_data = true",
        }
        if self._recipe.checkpoint.accept_changed_data:
            del ways_out["samples_per_epoch"]
            self._warn_of_another_epoch(state["samples_per_epoch"])
        for key, way_out in ways_out.items():
            if state[key] != own[key]:
                raise ValueError(
                    f"the checkpoint was written with {key} = {state[key]}, this run has {own[key]}: its position "
                    f"would refer to other samples; {way_out}, or load only the weights with checkpoint.load_from"
                )
        self._training.load_state(state["stream"])
        self._next_sample = state["next_sample"]
        self._position = self._read_position()
        self._ahead.clear()

    def _warn_of_another_epoch(self, before: int) -> None:
        if (now := self._training.samples_per_epoch) != before:
            effect = "sequences follow in a new random order: some of this epoch come twice, others not at all"
            if not self._recipe.data.is_shuffled:
                effect = "the run goes on at the same sequence"
            logger.warning("an epoch has %d sequences (was %d); %s", now, before, effect)

    def _read_position(self) -> dict[str, Any]:
        epoch = self._training.epoch_after(self._next_sample)
        position = {"next_sample": self._next_sample, "stream": self._training.state(), "epoch": epoch}
        return position | {"epochs": self._training.epochs()}

    def _pack(self, samples: list[Sample]) -> Batch:
        return pack(samples, self._recipe.train.micro_batch_sequences, self._recipe.data.document_attention)


class OpenedData(NamedTuple):
    """The data of a recipe, before a rank takes its part of it."""

    tokenizer: Tokenizer
    source: Source


def open_data(
    recipe: Recipe,
    run_folder: str | Path,
    barrier: Callable[[], None],
    *,
    builds_cache: bool = True,
    open_: Callable[[Recipe, Tokenizer, Cache], Source] = open_source,
) -> OpenedData:
    """Open a recipe's data. A rank that `builds_cache` tokenises what is not cached yet; the others wait in `barrier`,
    which all ranks call equally often.

    Raises: ValueError, FileNotFoundError or ImportError, each naming the field of `[data]` to change.
    """
    data, vocab_size = recipe.data, recipe.model.vocab_size
    tokenizer = build_tokenizer(data.tokenizer, data.source, vocab_size, split_special_tokens=data.split_special_tokens)
    cache = Cache(folder_of(data.cache_folder, run_folder), is_builder=builds_cache, barrier=barrier)
    return OpenedData(tokenizer, open_(recipe, tokenizer, cache))


def build_loader(
    recipe: Recipe,
    dp_rank: int,
    dp_size: int,
    run_folder: str | Path,
    barrier: Callable[[], None],
    shard: SequenceShard = WHOLE_SEQUENCES,
    *,
    builds_cache: bool = True,
    open_: Callable[[Recipe, Tokenizer, Cache], Source] = open_source,
) -> Loader:
    """Open a recipe's data for one data-parallel rank, or one of its context-parallel ranks, which has a shard.

    Rank 0 tokenises data that is not cached yet; the other ranks wait in `barrier`, which all ranks call equally often.
    `builds_cache` is False for ranks that read the same tokens as rank 0. `open_` opens the data.

    Raises: ValueError, FileNotFoundError or ImportError, each naming the field of `[data]` to change.
    """
    check_batch(recipe, dp_size)
    is_builder = builds_cache and dp_rank == shard.rank == 0
    tokenizer, source = open_data(recipe, run_folder, barrier, builds_cache=is_builder, open_=open_)
    return Loader(recipe, dp_rank, dp_size, tokenizer, source, shard)


def check_batch(recipe: Recipe, dp_size: int) -> None:
    """Raises: ValueError if the sequences of a step cannot be divided over the ranks."""
    train = recipe.train
    if train.global_batch_sequences % (train.micro_batch_sequences * dp_size) != 0:
        raise ValueError(
            f"train.global_batch_sequences = {train.global_batch_sequences} is not a multiple of "
            f"train.micro_batch_sequences = {train.micro_batch_sequences} times {dp_size} data-parallel ranks; "
            f"make it a multiple of {train.micro_batch_sequences * dp_size}"
        )
