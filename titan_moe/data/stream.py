"""Pack samples from a stream of documents, which can only be read in order."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from titan_moe.data.sample import Sample
from titan_moe.data.samples import Samples
from titan_moe.data.tokenizer import Tokenizer


class Documents(Protocol):
    """One pass over documents."""

    num_read: int

    def read(self) -> Any: ...
    def place(self) -> dict[str, Any] | None: ...


class NoDocumentsError(ValueError):
    """A whole pass over documents has none to learn from."""


OpenDocuments = Callable[[int, dict[str, Any] | None], Documents]
"""(num_read, place) -> a pass that starts at document `num_read`. The state `place` of that document, from
`Documents.place`, saves reading the documents before it."""


@dataclass(frozen=True)
class _Position:
    """The position of a token in a stream."""

    epoch: int = 0
    num_documents: int = 0
    """Documents of this epoch before the token's own."""
    offset_tokens: int = 0
    """Tokens of its document before it."""
    place: dict[str, Any] | None = None
    """State of the stream at the start of its document."""


class StreamedSamples(Samples):
    """Pack a stream of documents into samples. The state is the exact token where the next sample begins.

    Every rank tokenises the whole stream and keeps its slice, so the global order does not depend on the number of
    ranks. The stream restarts at its end. The first `num_reserved` documents of every epoch are skipped; validation
    uses them.
    """

    def __init__(
        self, open_documents: OpenDocuments, tokenizer: Tokenizer, seq_len_tokens: int, num_reserved: int = 0
    ) -> None:
        self._open_documents = open_documents
        self._tokenizer = tokenizer
        self._seq_len_tokens = seq_len_tokens
        self._num_reserved = num_reserved
        self._seek(_Position(num_documents=num_reserved))

    @property
    def epoch(self) -> int:
        """How many times the stream has restarted."""
        return self._next.epoch

    @property
    def num_documents_touched(self) -> int:
        """Documents of this epoch up to and including the one with the next sample's first token."""
        return self._next.num_documents + 1

    def epoch_after(self, num_samples: int) -> float | None:
        """The restarts so far: the rest of a stream is unknown."""
        return float(self.epoch)

    def take(self, first: int, count: int, mine: range) -> list[Sample]:
        samples = [self._take_one() for _ in range(count)]
        return [samples[offset] for offset in mine]

    def state(self) -> str:
        return json.dumps(asdict(self._next))

    def load_state(self, state: str) -> None:
        position = json.loads(state or "{}")
        if "lanes" in position:
            raise ValueError(
                "the checkpoint's stream is in lanes, this run's is not; set data.stream_lanes back, or start a new "
                "run from the weights with checkpoint.load_from"
            )
        if "epoch" not in position:
            raise ValueError(
                "the checkpoint's data was not a stream, this run's is; set data.source and data.is_streamed back, or "
                "start a new run from the weights with checkpoint.load_from"
            )
        self._seek(_Position(**position))

    def _seek(self, position: _Position) -> None:
        self._next = position
        self._documents: Documents | None = None
        self._tokens = np.empty(0, dtype=np.int64)
        self._document_ids = np.empty(0, dtype=np.int32)

    def _take_one(self) -> Sample:
        """Return N + 1 tokens. The last one is kept: it is also the first token of the next sample. That token is
        always in the document read last, so one document and one offset describe the position."""
        length = self._seq_len_tokens
        while len(self._tokens) <= length:
            self._append_document()
        sample = Sample(self._tokens[: length + 1], self._document_ids[: length + 1] - self._document_ids[0])
        self._tokens, self._document_ids = self._tokens[length:], self._document_ids[length:]
        self._next = _Position(*self._last_start, self._last_tokens - len(self._tokens), self._last_place)
        return sample

    def _append_document(self) -> None:
        if self._documents is None:
            documents = self._open_documents(self._next.num_documents, self._next.place)
            tokens = self._read(self._next.epoch, documents)[self._next.offset_tokens :]
        else:
            tokens = self._read(self._last_start[0], self._documents)
        number = self._document_ids[-1] + 1 if len(self._document_ids) else 0
        self._tokens = np.concatenate([self._tokens, tokens])
        self._document_ids = np.concatenate([self._document_ids, np.full(len(tokens), number, dtype=np.int32)])

    def _read(self, epoch: int, documents: Documents) -> np.ndarray:
        """Read the next document that has a token, past the end of an epoch if necessary, and record its start.

        Raises: NoDocumentsError if a whole pass has no token.
        """
        first_epoch = epoch
        while True:
            start, place = (epoch, documents.num_read), documents.place()
            if (text := documents.read()) is None:
                if epoch > first_epoch:
                    raise NoDocumentsError(
                        f"data.path has no document with text after the {self._num_reserved} documents reserved for "
                        "validation; add data, or lower validation.num_sequences"
                    )
                epoch, documents = epoch + 1, self._open_documents(self._num_reserved, None)
                continue
            (tokens,) = self._tokenizer.encode_documents([text])
            if len(tokens) > 0:
                self._documents, self._last_start, self._last_place = documents, start, place
                self._last_tokens = len(tokens)
                return tokens.astype(np.int64)
