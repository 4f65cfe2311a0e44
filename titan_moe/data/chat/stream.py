"""Pack whole conversations of a stream, which can only be read in order."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from titan_moe.data.chat.whole import WINDOW_SEQUENCES, assign, fill
from titan_moe.data.sample import Sample
from titan_moe.data.samples import Samples
from titan_moe.data.stream import Documents, NoDocumentsError, OpenDocuments


@dataclass(frozen=True)
class _Position:
    """The position of a sequence in a stream: conversations that are packed together, and a number."""

    epoch: int = 0
    num_documents: int = 0
    """Rows of this epoch before the window."""
    place: dict[str, Any] | None = None
    """State of the stream at its start."""
    num_taken: int = 0
    """Sequences of the window before this one."""


class ConversationStream(Samples):
    """Read a stream window by window, and pack the conversations of each as those of a corpus are. The state is the
    start of a window and a number of sequences, so a resume reads one window again.

    Every rank reads the whole stream, and it restarts at its end, as in `StreamedSamples`. The first `num_reserved`
    rows of every epoch are skipped.
    """

    def __init__(
        self,
        open_documents: OpenDocuments,
        seq_len_tokens: int,
        num_reserved: int = 0,
        window_sequences: int = WINDOW_SEQUENCES,
    ) -> None:
        """`open_documents` opens passes over codes."""
        self._open_documents = open_documents
        self._num_tokens = seq_len_tokens + 1
        self._num_reserved = self._num_read = num_reserved
        self._window_tokens = window_sequences * self._num_tokens
        self._documents: Documents | None = None
        self._codes: list[np.ndarray] = []
        self._sequences: list[list[int]] = []
        self._next = self._following = _Position(num_documents=num_reserved)

    @property
    def epoch(self) -> int:
        """How many times the stream has restarted."""
        return self._next.epoch

    @property
    def num_documents_touched(self) -> int:
        """Rows of this epoch before the next window, or up to the end of the one with the next sample."""
        return self._num_read if self._next.num_taken else self._next.num_documents

    def epoch_after(self, num_samples: int) -> float | None:
        """The restarts so far: the rest of a stream is unknown."""
        return float(self.epoch)

    def take(self, first: int, count: int, mine: range) -> list[Sample]:
        samples = []
        for offset in range(count):
            if not self._sequences:
                self._read_window()
            sequence = self._sequences[self._next.num_taken]
            if offset in mine:
                samples.append(fill([self._codes[number] for number in sequence], self._num_tokens))
            self._next = replace(self._next, num_taken=self._next.num_taken + 1)
            if self._next.num_taken == len(self._sequences):
                self._next = self._following
                self._sequences = []
        return samples

    def state(self) -> str:
        return json.dumps({"window": asdict(self._next)})

    def load_state(self, state: str) -> None:
        position = json.loads(state or "{}").get("window")
        if position is None:
            raise ValueError(
                "the checkpoint's data was not a stream of conversations, this run's is; set data.format, data.source "
                "and data.is_streamed back, or start a new run from the weights with checkpoint.load_from"
            )
        self._seek(_Position(**position))

    def _seek(self, position: _Position) -> None:
        self._next, self._documents = position, None
        self._sequences = []

    def _read_window(self) -> None:
        """Read the conversations of the next window, in the next epoch if this one has no more.

        Raises: NoDocumentsError if a whole pass has none.
        """
        if not self._read_codes(self._next):
            self._next = self._following
            if not self._read_codes(self._next):
                raise NoDocumentsError(
                    f"data.path has no conversation to learn from after the {self._num_reserved} rows reserved for "
                    "validation; add data, or lower validation.num_sequences"
                )
        self._sequences = assign([len(codes) for codes in self._codes], self._num_tokens)

    def _read_codes(self, start: _Position) -> bool:
        """Read the conversations of the window at `start`, and find where the following one starts."""
        documents = self._documents or self._open_documents(start.num_documents, start.place)
        self._documents = None  # after an error the window is read again
        self._codes, num_tokens = [], 0
        while num_tokens < self._window_tokens:
            codes = documents.read()
            self._num_read = documents.num_read
            if codes is None:
                self._following = _Position(start.epoch + 1, self._num_reserved)
                return bool(self._codes)
            self._codes.append(codes)
            num_tokens += len(codes)
        self._documents = documents
        self._following = _Position(start.epoch, documents.num_read, documents.place())
        return True
