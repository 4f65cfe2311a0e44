"""A stream of conversations has the sequences of a corpus, and every position resumes."""

import json
from typing import Any

import numpy as np
import pytest

from titan_moe.data.chat.stream import ConversationStream
from titan_moe.data.chat.whole import assign, fill, windows

SEQ_LEN, WINDOW = 9, 3
LENGTHS = [3, 10, 1, 4, 7, 2, 2, 8, 5, 6, 1, 9, 3]
CODES = [np.arange(20 * number, 20 * number + length, dtype="<u4") for number, length in enumerate(LENGTHS)]


class Listed:
    """A pass over conversations, with or without resumable states."""

    def __init__(self, codes: list[np.ndarray], num_read: int, place: dict[str, Any] | None, has_places: bool) -> None:
        assert place is None or place == {"at": num_read}
        self.num_read, self._codes, self._has_places = num_read, codes, has_places

    def read(self) -> np.ndarray | None:
        if self.num_read == len(self._codes):
            return None
        self.num_read += 1
        return self._codes[self.num_read - 1]

    def place(self) -> dict[str, Any] | None:
        return {"at": self.num_read} if self._has_places else None


def open_stream(
    codes: list[np.ndarray] = CODES, num_reserved: int = 0, has_places: bool = True, window: int = WINDOW
) -> ConversationStream:
    def open_documents(num_read: int, place: dict[str, Any] | None) -> Listed:
        return Listed(codes, num_read, place, has_places)

    return ConversationStream(open_documents, SEQ_LEN, num_reserved, window)


def brute_force(count: int, codes: list[np.ndarray] = CODES) -> list[list[int]]:
    sequences: list[list[int]] = []
    while len(sequences) < count:
        for first, last in windows(np.array([len(one) for one in codes]), WINDOW * (SEQ_LEN + 1)):
            part = codes[first:last]
            plan = assign([len(one) for one in part], SEQ_LEN + 1)
            sequences += [fill([part[at] for at in sequence], SEQ_LEN + 1).tokens.tolist() for sequence in plan]
    return sequences[:count]


def take(stream: ConversationStream, count: int) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in stream.take(0, count, range(count))]


@pytest.mark.parametrize("has_places", [True, False])
def test_every_position_resumes_exactly(has_places: bool) -> None:
    expected, running = brute_force(40), open_stream(has_places=has_places)
    for taken in range(30):
        resumed = open_stream(has_places=has_places)
        resumed.load_state(running.state())
        assert resumed.state() == running.state()
        assert take(resumed, 10) == expected[taken : taken + 10]
        assert take(running, 1) == expected[taken : taken + 1]
    assert running.epoch >= 2
    assert running.epoch_after(99) == float(running.epoch)


def test_ranks_have_slices_of_one_order() -> None:
    whole, mine = open_stream(), open_stream()
    kept = [sample.tokens.tolist() for sample in mine.take(0, 8, range(2, 4))]
    assert kept == take(whole, 8)[2:4]
    assert mine.state() == whole.state()


def test_reserved_conversations_are_those_of_the_first_window() -> None:
    held_out = open_stream(window=1)
    assert held_out.num_documents_touched == 0
    take(held_out, 1)
    assert held_out.num_documents_touched == 2  # 3 + 10 tokens
    assert take(open_stream(num_reserved=2), 20) == brute_force(20, CODES[2:])
    few = open_stream()
    take(few, 1)
    assert few.num_documents_touched == 8  # the first window has 3 + 10 + 1 + 4 + 7 + 2 + 2 + 8 tokens


def test_a_window_is_read_again_after_an_error() -> None:
    codes, is_broken = list(CODES), [True]

    class Broken(Listed):
        def read(self) -> np.ndarray | None:
            if self.num_read == 5 and is_broken:
                raise ValueError("broken")
            return super().read()

    stream = ConversationStream(lambda num_read, place: Broken(codes, num_read, place, True), SEQ_LEN, 0, WINDOW)
    before = stream.state()
    with pytest.raises(ValueError, match="broken"):
        take(stream, 1)
    assert stream.state() == before
    is_broken.clear()
    assert take(stream, 5) == brute_force(5)


def test_streams_without_conversations_and_other_states_are_refused() -> None:
    with pytest.raises(ValueError, match="no conversation to learn from after the 0 rows"):
        take(open_stream([]), 1)
    with pytest.raises(ValueError, match="after the 13 rows reserved for validation"):
        take(open_stream(num_reserved=13), 1)
    with pytest.raises(ValueError, match="was not a stream of conversations"):
        open_stream().load_state(json.dumps({"epoch": 0}))
