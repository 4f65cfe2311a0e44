"""The global order of training samples, the same under every layout."""

import json
from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np

from titan_moe.data.hashing import derive_key, hash_counters, permute
from titan_moe.data.packing import Sample

_ORDER = 1  # keeps the order's random numbers apart from those of other uses of the same seed


class IndexedSamples(Protocol):
    """Samples that can be asked for by number, in any order."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...


class Samples(ABC):
    """An endless sequence of samples, read forward; what the loader cuts steps from."""

    samples_per_epoch: int = 0
    """Samples before the first one comes again; 0 where that is unknown or never."""
    order: str = ""
    """What the sample of a number depends on beside the data, in words."""

    @abstractmethod
    def take(self, first: int, count: int, mine: range) -> list[Sample]:
        """Read samples [first, first + count) of the run and keep those at the offsets `mine`."""

    def state(self) -> str:
        """Say, as JSON, what a position means beside the sample number: the order, or where in a stream it is."""
        return json.dumps({"order": self.order})

    def load_state(self, state: str) -> None:
        """Go back to where `state` was taken; "" is a state of before there were orders in them."""
        order = json.loads(state).get("order") if state else self.order
        if order is None:
            raise ValueError(
                "the checkpoint's data was a stream, this run's is not; set data.source and data.is_streamed back, or "
                "start a new run from the weights with checkpoint.load_from"
            )
        if order != self.order:
            raise ValueError(
                f"the checkpoint's samples come {order}, this run's {self.order}: its position would mean other "
                "samples; set run.seed and data.is_shuffled back, or start a new run from the weights with "
                "checkpoint.load_from"
            )


class EpochSamples(Samples):
    """Go through indexed samples epoch by epoch, each sample once an epoch, in a seeded order that differs by epoch."""

    def __init__(self, samples: IndexedSamples, seed: int, is_shuffled: bool) -> None:
        self.samples_per_epoch = len(samples)
        self._samples = samples
        self._seed = seed
        self._is_shuffled = is_shuffled
        self.order = f"shuffled by run.seed = {seed}" if is_shuffled else "unshuffled"

    def take(self, first: int, count: int, mine: range) -> list[Sample]:
        numbers = np.asarray(mine, dtype=np.int64) + first
        return [self._samples[int(index)] for index in self._indices(numbers)]

    def _indices(self, numbers: np.ndarray) -> np.ndarray:
        epochs, positions = np.divmod(numbers, self.samples_per_epoch)
        if not self._is_shuffled:
            return positions
        keys = hash_counters(derive_key(self._seed, _ORDER), epochs)
        return permute(positions, self.samples_per_epoch, keys)
