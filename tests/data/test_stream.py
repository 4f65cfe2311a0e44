"""Samples of a stream equal brute-force packing, and every position resumes at its exact token."""

import json
from typing import Any

import numpy as np
import pytest

from titan_moe.data.stream import StreamedSamples
from titan_moe.data.tokenizer import ByteTokenizer

SEQ_LEN = 7
TEXTS = ["abc", "", "d" * 40, "efgh", "i", "", "jklmnop", "qrstuv", "w"]


class _ListedDocuments:
    """A pass over a list of texts, with or without resumable states."""

    def __init__(self, texts: list[str], num_read: int, place: dict[str, Any] | None, has_places: bool) -> None:
        assert place is None or place == {"at": num_read}
        self.num_read = num_read
        self._texts = texts
        self._has_places = has_places

    def read(self) -> str | None:
        if self.num_read == len(self._texts):
            return None
        self.num_read += 1
        return self._texts[self.num_read - 1]

    def place(self) -> dict[str, Any] | None:
        return {"at": self.num_read} if self._has_places else None


def _stream(texts: list[str] = TEXTS, num_reserved: int = 0, has_places: bool = True) -> StreamedSamples:
    def open_documents(num_read: int, place: dict[str, Any] | None) -> _ListedDocuments:
        return _ListedDocuments(texts, num_read, place, has_places)

    return StreamedSamples(open_documents, ByteTokenizer(), SEQ_LEN, num_reserved)


def _brute_force(texts: list[str], count: int) -> list[tuple[list[int], list[int]]]:
    flat: list[tuple[int, int]] = []
    number = 0
    while len(flat) < count * SEQ_LEN + 1:
        for text in filter(None, texts):
            flat += [(token, number) for token in [*text.encode(), 0]]
            number += 1
    cuts = [flat[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(count)]
    return [([token for token, _ in cut], [number - cut[0][1] for _, number in cut]) for cut in cuts]


def _take(stream: StreamedSamples, count: int) -> list[tuple[list[int], list[int]]]:
    return [(s.tokens.tolist(), s.document_ids.tolist()) for s in stream.take(0, count, range(count))]


def test_stream_samples_equal_brute_force_over_epochs() -> None:
    stream = _stream()
    assert _take(stream, 40) == _brute_force(TEXTS, 40)
    assert stream.epoch >= 3


@pytest.mark.parametrize("has_places", [True, False])
def test_stream_every_position_resumes_exactly(has_places: bool) -> None:
    expected = _brute_force(TEXTS, 40)
    running = _stream(has_places=has_places)
    for taken in range(30):
        state = running.state()
        assert json.loads(state)["place"] is None or has_places
        resumed = _stream(has_places=has_places)
        resumed.load_state(state)
        assert resumed.state() == state
        assert _take(resumed, 10) == expected[taken : taken + 10]
        assert _take(running, 1) == expected[taken : taken + 1]


def test_stream_state_is_equal_on_all_ranks() -> None:
    whole, mine = _stream(), _stream()
    kept = mine.take(0, 8, range(2, 4))
    assert [sample.tokens.tolist() for sample in kept] == [tokens for tokens, _ in _take(whole, 8)[2:4]]
    assert mine.state() == whole.state()


def test_stream_skips_reserved_documents_in_every_epoch() -> None:
    assert _take(_stream(num_reserved=4), 20) == _brute_force(TEXTS[4:], 20)


def test_stream_counts_documents_touched() -> None:
    stream = _stream()
    touched = []
    for _ in range(8):
        stream.take(0, 1, range(1))
        touched.append(stream.num_documents_touched)
    # 4 tokens of "abc", 41 of "ddd...", 5 of "efgh", 2 of "i", 8 of "jklmnop": sample i ends on token 7 * (i + 1)
    assert touched == [3, 3, 3, 3, 3, 3, 4, 7]


def test_stream_without_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no document with text"):
        _stream(texts=["", ""]).take(0, 1, range(1))
    with pytest.raises(ValueError, match="after the 9 documents reserved for validation"):
        _stream(num_reserved=9).take(0, 1, range(1))


def test_stream_refuses_a_state_of_indexed_samples() -> None:
    with pytest.raises(ValueError, match="data.is_streamed"):
        _stream().load_state("")


def test_stream_tokens_are_int64_and_document_ids_int32() -> None:
    (sample,) = _stream().take(0, 1, range(1))
    assert (sample.tokens.dtype, sample.document_ids.dtype) == (np.int64, np.int32)
