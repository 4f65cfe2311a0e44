"""The samples of one lane of a stream, shuffled in blocks."""

import json
from typing import Any, Protocol

import numpy as np

from titan_moe.data.bad_rows import BadRows
from titan_moe.data.hashing import derive_key, permute
from titan_moe.data.sample import Sample
from titan_moe.data.stream import NoDocumentsError

_ORDER = 5  # hashed with the seed: other uses of the same seed draw other numbers


class PackedPart(Protocol):
    """The samples of a part of a stream, in its own order."""

    @property
    def epoch(self) -> int: ...
    def take(self, first: int, count: int, mine: range) -> list[Sample]: ...
    def state(self) -> str: ...
    def load_state(self, state: str) -> None: ...


class Lane:
    """Read blocks of samples, and give those of a block in a seeded order. The state is the start of a block and how
    many samples of it are given, so a resume reads one block again.

    A part without a document to learn from gives samples without labels: other lanes are on other ranks.
    """

    def __init__(
        self,
        part: PackedPart,
        number: int,
        num_lanes: int,
        seed: int,
        block_sequences: int,
        seq_len_tokens: int,
        bad_rows: BadRows,
    ) -> None:
        """The first block is shorter, by lane, so that lanes read their blocks at different steps."""
        self._part, self._number, self._seed, self._block_sequences = part, number, seed, block_sequences
        self._num_tokens, self._bad_rows = seq_len_tokens + 1, bad_rows
        self._is_empty = False
        self.num_taken = 0
        """Samples so far."""
        self._first_sequences = 1 + number * block_sequences // num_lanes
        self._num_block = self._num_given = 0
        self._start, self._epoch = part.state(), part.epoch
        self._block: list[Sample] = []

    @property
    def epoch(self) -> int:
        """How many times the part has been read."""
        return self._epoch

    def has_documents(self) -> bool:
        """Whether there is something to learn from."""
        self._fill()
        return not self._is_empty

    def take(self, count: int) -> list[Sample]:
        """Give the next samples."""
        self.num_taken += count
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> Sample:
        self._fill()
        if self._is_empty:
            no_tokens = np.zeros(self._num_tokens, dtype=np.int64)
            return Sample(no_tokens, no_tokens.astype(np.int32), is_bad=True)
        sample = self._block[self._num_given]
        self._num_given += 1
        if self._num_given == len(self._block):
            self._num_block, self._num_given, self._start = self._num_block + 1, 0, self._part.state()
            self._block = []
        return sample

    def _fill(self) -> None:
        if self._block or self._is_empty:
            return
        count = self._first_sequences if self._num_block == 0 else self._block_sequences
        try:
            samples = self._part.take(0, count, range(count))
        except NoDocumentsError:
            self._is_empty = True
            where = f"the part of the data that lane {self._number} reads"
            self._bad_rows.skip("lane", f"{where}: it has nothing to learn from, and its sequences have no labels")
            return
        self._epoch = self._part.epoch
        keys = np.repeat(derive_key(self._seed, _ORDER, self._number, self._num_block), count)
        self._block = [samples[place] for place in permute(np.arange(count), count, keys)]

    def state(self) -> dict[str, Any]:
        """As JSON has it."""
        start = json.loads(self._start)
        place = {"block": self._num_block, "given": self._num_given, "start": start}
        return {"taken": self.num_taken, "epoch": self._epoch, **place}

    def load_state(self, state: dict[str, Any]) -> None:
        self._start = json.dumps(state["start"])
        self._part.load_state(self._start)
        self._num_block, self._num_given, self._block = state["block"], state["given"], []
        self.num_taken = state["taken"]
        self._epoch = state.get("epoch", self._part.epoch)  # states of earlier versions have none
        self._is_empty = False
