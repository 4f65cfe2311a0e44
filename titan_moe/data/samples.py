"""The global order of training samples, equal for every parallel layout."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from titan_moe.data.hashing import derive_key, hash_counters, permute
from titan_moe.data.sample import Sample

_ORDER = 1  # hashed with the seed: other uses of the same seed draw other numbers


class IndexedSamples(Protocol):
    """Samples with random access by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...


class Samples(ABC):
    """An endless sequence of samples, read in order. The loader reads steps from it."""

    samples_per_epoch: int = 0
    """Samples of one epoch; 0 if unknown or without end."""
    order: str = ""
    """Describes the order of samples. Checkpoints store this text, and a resume compares it."""

    is_divided: bool = False
    """Whether `state` is that of this rank's part; `merge` makes one of those of all ranks."""

    def places(self, count: int) -> list[float]:
        """Where in a step the next samples belong, from 0 to 1, ascending: data that ranks divide goes to the ranks
        that read it."""
        return [(number + 0.5) / count for number in range(count)]

    @abstractmethod
    def take(self, first: int, count: int, mine: range) -> list[Sample]:
        """Advance over samples [first, first + count) of the run and return those at the offsets `mine`."""

    def epoch_after(self, num_samples: int) -> float | None:
        """How many times the data is read after so many samples of the run, which are those taken; None if unknown."""
        return num_samples / self.samples_per_epoch if self.samples_per_epoch else None

    def epochs(self) -> dict[str, float]:
        """How many times each of several sources is read by the samples so far; empty for one source."""
        return {}

    def state(self) -> str:
        """Return, as JSON, the state beside the sample number: the order, or the position in a stream."""
        return json.dumps({"order": self.order})

    def merge(self, states: Sequence[str]) -> str:
        """The state of all ranks, of what `state` returns on each."""
        return states[0]

    def load_state(self, state: str) -> None:
        """Continue at the position of `state`. An empty string comes from a checkpoint without an order.

        Raises: ValueError for the state of a stream or of another order.
        """
        found = json.loads(state or "{}")
        order = found.get("order") if state else self.order
        if order == self.order:
            return
        problem = (
            f"the checkpoint's samples are {order}, this run's are {self.order}: its position would refer to other "
            "samples; set run.seed and data.is_shuffled back"
        )
        if order is None:
            was = "a mixture" if "mixture" in found else "a stream"
            problem = f"the checkpoint's data was {was}, this run's is not; set data.source and data.is_streamed back"
        raise ValueError(f"{problem}, or start a new run from the weights with checkpoint.load_from")


class EpochSamples(Samples):
    """Iterate over indexed samples in epochs: each sample once an epoch, in a seeded order that differs by epoch."""

    def __init__(self, samples: IndexedSamples, seed: int, is_shuffled: bool) -> None:
        self.samples_per_epoch = len(samples)
        self._samples = samples
        self._seed = seed
        self._is_shuffled = is_shuffled
        self.order = f"shuffled by run.seed = {seed}" if is_shuffled else "unshuffled"

    def take(self, first: int, count: int, mine: range) -> list[Sample]:
        if not len(mine):
            return []
        numbers = np.asarray(mine, dtype=np.int64) + first
        epochs, indices = np.divmod(numbers, self.samples_per_epoch)
        if self._is_shuffled:
            keys = hash_counters(derive_key(self._seed, _ORDER), epochs)
            indices = permute(indices, self.samples_per_epoch, keys)
        return [self._samples[int(index)] for index in indices]
