"""Samples of a stream in lanes: a rank reads only those of which it has sequences."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from titan_moe.data.lanes.lane import Lane
from titan_moe.data.sample import Sample
from titan_moe.data.samples import Samples


class LaneSamples(Samples):
    """Each sequence of a step has lanes of its own, or several sequences next to each other have one lane. So the order
    depends on the number of lanes and on `train.global_batch_sequences`, not on ranks.

    The state of a rank has the places in the lanes that it has opened. `merge` makes one state of those of all ranks.
    """

    is_divided = True

    def __init__(self, open_lane: Callable[[int], Lane], num_lanes: int) -> None:
        self.num_lanes = num_lanes
        self._open_lane = open_lane
        self._lanes: dict[int, Lane] = {}
        self._states: dict[str, Any] = {}
        """Of lanes as they were loaded."""
        self._counts = [0] * num_lanes
        """Samples of each lane so far, on all ranks."""

    def epoch_after(self, num_samples: int) -> float | None:
        """The mean of the restarts of lanes that are open here."""
        epochs = [lane.epoch for lane in self._lanes.values()]
        return sum(epochs) / len(epochs) if epochs else 0.0

    def take(self, first: int, count: int, mine: range) -> list[Sample]:
        counts, own = list(self._counts), []
        for lane, slots in self._deal(counts, count):
            counts[lane] += len(slots)
            if slots.start < mine.stop and mine.start < slots.stop:
                samples = self._lane(lane).take(len(slots))
                own += [sample for slot, sample in zip(slots, samples, strict=True) if slot in mine]
        self._counts = counts
        return own

    def _deal(self, counts: Sequence[int], count: int) -> Iterator[tuple[int, range]]:
        """The lane of each sequence of a step. Of several lanes of a sequence that is the one which has given least."""
        if self.num_lanes < count:
            for lane in range(self.num_lanes):
                yield lane, range(-(-lane * count // self.num_lanes), -(-(lane + 1) * count // self.num_lanes))
            return
        for slot in range(count):
            lanes = range(slot * self.num_lanes // count, (slot + 1) * self.num_lanes // count)
            yield min(lanes, key=counts.__getitem__), range(slot, slot + 1)

    def _lane(self, number: int) -> Lane:
        if number not in self._lanes:
            lane = self._open_lane(number)
            if (state := self._states.get(str(number))) is not None:
                lane.load_state(state)
            self._lanes[number] = lane
        return self._lanes[number]

    def state(self) -> str:
        opened = {str(number): lane.state() for number, lane in sorted(self._lanes.items())}
        return _dump(self.num_lanes, self._counts, self._states | opened, sorted(opened))

    def merge(self, states: Sequence[str]) -> str:
        found = [json.loads(state) for state in states]
        lanes: dict[str, Any] = dict(found[0]["lanes"])
        for state in found:
            lanes |= {number: state["lanes"][number] for number in state["opened"]}
        return _dump(self.num_lanes, found[0]["counts"], dict(sorted(lanes.items())), [])

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
        self._states, self._counts, self._lanes = found["lanes"], found["counts"], {}


def _dump(num_lanes: int, counts: Sequence[int], lanes: dict[str, Any], opened: Sequence[str]) -> str:
    return json.dumps({"num_lanes": num_lanes, "counts": list(counts), "lanes": lanes, "opened": list(opened)})
