"""Steps for one data-parallel rank, cut from the global order of samples.

Shapes: M microbatches · B sequences · N tokens of a sequence.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titan_moe.config import Recipe
from titan_moe.data.cache import Cache
from titan_moe.data.packing import IGNORE_LABEL, Batch, Sample, pack
from titan_moe.data.sources import Source, open_source
from titan_moe.data.tokenizer import Tokenizer, build_tokenizer


class Loader:
    """Hand one rank its part of every step; the state is one number, the same on every rank.

    Step s reads samples [s*G, (s+1)*G) of the global order, rank r the r-th of dp_size equal contiguous slices of
    them, M microbatches of B. Nothing in the state names a rank, so a run resumes onto any number of them.
    """

    def __init__(self, recipe: Recipe, dp_rank: int, dp_size: int, tokenizer: Tokenizer, source: Source) -> None:
        self.tokenizer = tokenizer
        self._training, self._validation = source
        self._recipe = recipe
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._next_sample = 0

    def next_step(self) -> Batch:
        """Read this rank's microbatches of the next optimizer step."""
        num_global = self._recipe.train.global_batch_sequences
        num_mine = num_global // self._dp_size
        mine = range(self._dp_rank * num_mine, (self._dp_rank + 1) * num_mine)
        samples = self._training.take(self._next_sample, num_global, mine)
        self._next_sample += num_global
        return self._pack(samples)

    def validation_batches(self) -> Iterator[Batch]:
        """Read this rank's held-out microbatches: the same ones every time, as many on every rank.

        `validation.num_sequences` of them, evenly spaced over what is held out, go round the ranks; a place that is
        left over has IGNORE_LABEL for every label.
        """
        count = min(self._recipe.validation.num_sequences, len(self._validation))
        if count == 0:
            raise ValueError(
                f"nothing is held out for validation: data.holdout_fraction = {self._recipe.data.holdout_fraction} is "
                f"{len(self._validation)} sequences, of which validation.num_sequences = "
                f"{self._recipe.validation.num_sequences} are asked for; raise what is too small"
            )
        size = self._recipe.train.micro_batch_sequences
        for first in range(self._dp_rank * size, _round_up(count, self._dp_size * size), self._dp_size * size):
            numbers = range(first, min(first + size, count))
            samples = [self._validation[number * len(self._validation) // count] for number in numbers]
            yield self._pack_padded(samples, size)

    def state_dict(self) -> dict[str, Any]:
        """Say where the run stands in its data, in integers and one string; alike on every rank."""
        return {
            "next_sample": self._next_sample,
            "seq_len_tokens": self._recipe.train.seq_len_tokens,
            "samples_per_epoch": self._training.samples_per_epoch,
            "stream": self._training.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, on any number of ranks.

        Raises: ValueError where the same sample number would mean another sample.
        """
        own = self.state_dict()
        for key, way_out in (
            ("seq_len_tokens", "set train.seq_len_tokens back"),
            ("samples_per_epoch", "bring back the corpus, tokenizer and holdout that it was trained on"),
        ):
            if state[key] != own[key]:
                raise ValueError(
                    f"the checkpoint counts its data with {key} = {state[key]}, this run with {own[key]}: its position "
                    f"would mean other samples; {way_out}, or start from the weights alone with checkpoint.load_from"
                )
        self._training.load_state(state["stream"])
        self._next_sample = state["next_sample"]

    def _pack(self, samples: list[Sample]) -> Batch:
        train = self._recipe.train
        return pack(samples, train.micro_batch_sequences, self._recipe.data.document_attention)

    def _pack_padded(self, samples: list[Sample], size: int) -> Batch:
        num_real, num_tokens = len(samples), self._recipe.train.seq_len_tokens + 1
        nothing = Sample(np.zeros(num_tokens, dtype=np.int64), np.zeros(num_tokens, dtype=np.int32))
        batch = self._pack(samples + [nothing] * (size - num_real))
        batch.labels_MBN[:, num_real:] = IGNORE_LABEL
        return batch


def build_loader(
    recipe: Recipe, dp_rank: int, dp_size: int, run_folder: str | Path, barrier: Callable[[], None]
) -> Loader:
    """Open a recipe's data for one data-parallel rank.

    Rank 0 tokenises what is not cached yet while the others wait in `barrier`, which every rank calls equally often.
    Raises: ValueError, FileNotFoundError or ImportError, each naming the field of `[data]` that must change.
    """
    train = recipe.train
    if train.global_batch_sequences % (train.micro_batch_sequences * dp_size) != 0:
        raise ValueError(
            f"train.global_batch_sequences = {train.global_batch_sequences} is no multiple of "
            f"train.micro_batch_sequences = {train.micro_batch_sequences} times {dp_size} data-parallel ranks; "
            f"make it a multiple of {train.micro_batch_sequences * dp_size}"
        )
    tokenizer = build_tokenizer(recipe.data.tokenizer, recipe.data.source, recipe.model.vocab_size)
    folder = Path(recipe.data.cache_folder or Path(run_folder) / "cache")
    cache = Cache(folder, is_builder=dp_rank == 0, barrier=barrier)
    return Loader(recipe, dp_rank, dp_size, tokenizer, open_source(recipe, tokenizer, cache))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
