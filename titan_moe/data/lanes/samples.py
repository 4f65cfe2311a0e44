"""Samples of a stream in lanes: a rank reads only those of which it has sequences."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from titan_moe.data.lanes.lane import Lane
from titan_moe.data.sample import Sample
from titan_moe.data.samples import Samples


class LaneSamples(Samples):
    """The sequences of a step are dealt to the lanes that have given least, in the order of the lanes. So each lane has
    given as many as any other to within one, and a sequence has the same few lanes at every step: their number over
    `train.global_batch_sequences`. The order depends on these two numbers, not on ranks.

    The state of a rank has the places in the lanes that it has opened. `merge` makes one state of those of all ranks.
    """

    is_divided = True

    def __init__(self, open_lane: Callable[[int], Lane], num_lanes: int) -> None:
        self.num_lanes = num_lanes
        self._open_lane = open_lane
        self._lanes: dict[int, Lane] = {}
        self._states: dict[str, Any] = {}
        """Of lanes as they were loaded."""
        self._counts = np.zeros(num_lanes, dtype=np.int64)
        """Samples of each lane so far, on all ranks."""
        self._has_documents = False

    def epoch_after(self, num_samples: int) -> float | None:
        """The mean of the restarts of lanes that are open here; right after a resume that of all lanes."""
        epochs = [lane.epoch for lane in self._lanes.values()] or [_epoch(state) for state in self._states.values()]
        return sum(epochs) / len(epochs) if epochs else 0.0

    def take(self, first: int, count: int, mine: range) -> list[Sample]:
        dealt, own = deal(self._counts, count), []
        for number in np.unique(dealt[mine.start : mine.stop]).tolist():
            lane, slots = self._lane(number), range(*np.searchsorted(dealt, [number, number + 1]).tolist())
            lane.take(int(self._counts[number]) - lane.num_taken)  # those of another rank that has the lane too
            own += [sample for slot, sample in zip(slots, lane.take(len(slots)), strict=True) if slot in mine]
        np.add.at(self._counts, dealt, 1)
        self._check_documents()
        return own

    def places(self, count: int) -> list[float]:
        """Where in the data the next samples are, from 0 to 1, ascending."""
        places: list[float] = ((deal(self._counts, count) + 0.5) / self.num_lanes).tolist()
        return places

    def _check_documents(self) -> None:
        """Raises: ValueError if no lane has anything to learn from."""
        if self._has_documents or any(lane.has_documents() for lane in self._lanes.values()):
            self._has_documents = True
            return
        others = (self._open_lane(number) for number in range(self.num_lanes) if number not in self._lanes)
        if self._lanes and not any(lane.has_documents() for lane in others):
            raise ValueError(
                "data.path has nothing to learn from after the documents reserved for validation; add data, or lower "
                "validation.num_sequences"
            )
        self._has_documents = bool(self._lanes)

    def _lane(self, number: int) -> Lane:
        if number not in self._lanes:
            lane = self._open_lane(number)
            if (state := self._states.get(str(number))) is not None:
                lane.load_state(state)
            self._lanes[number] = lane
        return self._lanes[number]

    def state(self) -> str:
        opened = {str(number): lane.state() for number, lane in sorted(self._lanes.items())}
        return _dump(self.num_lanes, self._counts.tolist(), self._states | opened)

    def merge(self, states: Sequence[str]) -> str:
        found, lanes = [json.loads(state) for state in states], dict[str, Any]()
        for number, lane in (entry for state in found for entry in state["lanes"].items()):
            if number not in lanes or lane["taken"] > lanes[number]["taken"]:
                lanes[number] = lane
        return _dump(self.num_lanes, found[0]["counts"], dict(sorted(lanes.items())))

    def load_state(self, state: str) -> None:
        found = json.loads(state or "{}")
        if "lanes" not in found:
            raise ValueError(
                "the checkpoint's data was no stream in lanes, this run's is; set data.source, data.is_streamed and "
                "data.stream_lanes back (0 for a stream from before lanes), or start a new run from the weights with "
                "checkpoint.load_from"
            )
        if found["num_lanes"] != self.num_lanes:
            raise ValueError(
                f"the checkpoint's stream has {found['num_lanes']} lanes, this run's has {self.num_lanes}: its places "
                "would refer to other samples; restore the files and data.stream_lanes, or start a new run from the "
                "weights with checkpoint.load_from"
            )
        # earlier versions wrote no `taken`: each lane was read by one rank, or by all
        self._states = {
            number: {"taken": found["counts"][int(number)]} | lane for number, lane in found["lanes"].items()
        }
        self._counts, self._lanes = np.array(found["counts"], dtype=np.int64), {}


def deal(counts: np.ndarray, count: int) -> np.ndarray:
    """The lane of each of `count` sequences, ascending, after so many of each lane. Those that have given least come
    first, at equal distances among each other."""
    counts, dealt = counts.copy(), np.empty(0, dtype=np.int64)
    while len(dealt) < count:
        least = np.flatnonzero(counts == counts.min())
        number = min(count - len(dealt), len(least))
        chosen = least[np.arange(number) * len(least) // number]
        counts[chosen] += 1
        dealt = np.append(dealt, chosen)
    return np.sort(dealt)


def _epoch(state: dict[str, Any]) -> int:
    """The restarts of a lane, of its state."""
    start = state["start"]
    epoch: int = state.get("epoch", start.get("window", start).get("epoch", 0))
    return epoch


def _dump(num_lanes: int, counts: Sequence[int], lanes: dict[str, Any]) -> str:
    return json.dumps({"num_lanes": num_lanes, "counts": list(counts), "lanes": lanes})
