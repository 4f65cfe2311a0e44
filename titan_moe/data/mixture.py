"""Mix the samples of several sources by their weights."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from titan_moe.data.sample import Sample
from titan_moe.data.samples import Samples

KEY = "mixture"
"""Of a mixture's state."""
_WHOLE = 1 << 40
"""Shares are integers over this number, so that the order is the same on every machine."""

logger = logging.getLogger(__name__)


def to_shares(weights: Sequence[float]) -> list[int]:
    """Shares of weights, over _WHOLE. What is left by rounding goes to the largest."""
    exact = [Fraction(weight) for weight in weights]
    shares = [int(weight * _WHOLE / sum(exact)) for weight in exact]
    shares[shares.index(max(shares))] += _WHOLE - sum(shares)
    return shares


def temper(sizes: Sequence[int], temperature: float) -> list[float]:
    """Weights that grow with sizes to the power of 1 / temperature."""
    largest = max(sizes)
    return [(size / largest) ** (1 / temperature) for size in sizes]


def choose(shares: Sequence[int], counts: Sequence[int]) -> int:
    """The source of the next sample, after so many of each.

    Of the sources whose deficit is large enough, the one that must be taken first is taken. Then each has its share to
    within 1 - 1 / (2k - 2) samples after every sample, for k sources (R. Tijdeman, The chairman assignment problem,
    1980). The source with the largest deficit alone would fall behind further with many weights.
    """
    k, number = sum(share > 0 for share in shares), sum(counts) + 1
    if k == 1:
        return next(index for index, share in enumerate(shares) if share)
    parts, best, first = 2 * k - 2, -1, 0
    for index, (share, count) in enumerate(zip(shares, counts, strict=True)):
        deficit = parts * (share * number - count * _WHOLE)
        if share and deficit >= _WHOLE:
            deadline = ((parts - 1) * _WHOLE - deficit) // (parts * share)
            if best < 0 or deadline < first:
                best, first = index, deadline
    return best


@dataclass
class _Place:
    """Where a run is in a source."""

    taken: int = 0
    """Samples of the run so far: the place in the order of the source."""
    counted: int = 0
    """Those since the shares are as they are."""


class UnreadSamples(Samples):
    """A source of weight 0, which is not opened. It keeps its place."""

    def __init__(self) -> None:
        self._state = ""

    def take(self, first: int, count: int, mine: range) -> list[Sample]:
        raise AssertionError("a source of weight 0 has no samples")

    def state(self) -> str:
        return self._state

    def load_state(self, state: str) -> None:
        self._state = state


class MixedSamples(Samples):
    """Samples of several sources, each in an order of its own.

    Beside sources that ranks divide, the samples of a step are in the order of `places`, so that a rank reads few of
    their parts.

    The state has the place in each source, by its name. Other shares count from the sample at which they begin.
    """

    def __init__(
        self, sources: Mapping[str, Samples], weights: Sequence[float], accepts_changed_data: bool = False
    ) -> None:
        self._sources = dict(sources)
        self._shares = to_shares(weights)
        self._places = {name: _Place() for name in sources}
        self._gone: dict[str, Any] = {}
        self._accepts_changed_data = accepts_changed_data
        self.order = "those of a mixture"
        self.is_divided = any(source.is_divided for source in sources.values())

    @property
    def shares(self) -> dict[str, float]:
        """The share of each source."""
        return {name: share / _WHOLE for name, share in zip(self._sources, self._shares, strict=True)}

    def samples_per_epoch_of(self, name: str) -> int:
        """Of a source; 0 if unknown."""
        return self._sources[name].samples_per_epoch

    def take(self, first: int, count: int, mine: range) -> list[Sample]:
        places = list(self._places.values())
        counts, order = [place.counted for place in places], list[int]()
        for _ in range(count):
            order.append(choose(self._shares, counts))
            counts[order[-1]] += 1
        if self.is_divided:
            order = self._by_place(order)
        read = []
        for number, (source, place) in enumerate(zip(self._sources.values(), places, strict=True)):
            before, own = (order[:end].count(number) for end in (mine.start, mine.stop))
            taken = order.count(number)
            read.append(iter(source.take(place.taken, taken, range(before, own)) if taken else ()))
        samples = [next(read[number]) for number in order[mine.start : mine.stop]]
        for number, place in enumerate(places):
            place.taken, place.counted = place.taken + order.count(number), counts[number]
        return samples

    def _by_place(self, order: list[int]) -> list[int]:
        """The sources of a step in the order of `places`."""
        placed = [
            (place, number)
            for number, source in enumerate(self._sources.values())
            if (taken := order.count(number))
            for place in source.places(taken)
        ]
        return [number for _, number in sorted(placed)]

    def epochs(self) -> dict[str, float]:
        """How many times each source is read by the samples so far, if that is known."""
        epochs = {name: source.epoch_after(self._places[name].taken) for name, source in self._sources.items()}
        return {name: epoch for name, epoch in epochs.items() if epoch is not None}

    def merge(self, states: Sequence[str]) -> str:
        found = [json.loads(state) for state in states]
        for name, place in found[0][KEY].items():
            place["state"] = self._sources[name].merge([other[KEY][name]["state"] for other in found])
        return json.dumps(found[0])

    def state(self) -> str:
        sources = {
            name: {
                "share": share,
                "taken": self._places[name].taken,
                "counted": self._places[name].counted,
                "samples_per_epoch": source.samples_per_epoch,
                "state": source.state(),
            }
            for (name, source), share in zip(self._sources.items(), self._shares, strict=True)
        }
        return json.dumps({KEY: sources, "gone": self._gone})

    def load_state(self, state: str) -> None:
        found = json.loads(state or "{}")
        if KEY not in found:
            raise ValueError(
                "the checkpoint's data was not a mixture, this run's is; set data.source back, or start a new run from "
                "the weights with checkpoint.load_from"
            )
        before, gone = found[KEY], found["gone"]
        self._check_names(before, gone)
        for name, source in self._sources.items():
            place = before.get(name) or gone.get(name)
            if place is not None and isinstance(source, UnreadSamples):
                source.samples_per_epoch = place["samples_per_epoch"]
                source.load_state(place["state"])
            elif place is not None and place["state"]:
                source.load_state(place["state"])
                self._check_size(name, place["samples_per_epoch"], source.samples_per_epoch)
            self._places[name] = _Place(place["taken"], place["counted"]) if place else _Place()
        self._gone = {name: place for name, place in (gone | before).items() if name not in self._sources}
        shares = dict(zip(self._sources, self._shares, strict=True))
        if {name: place["share"] for name, place in before.items()} != shares:
            self._log_shares({name: place["share"] for name, place in before.items()}, shares)
            for place in self._places.values():
                place.counted = 0

    def _check_names(self, before: Iterable[str], gone: Iterable[str]) -> None:
        """Refuse sources that came or went, unless other data is accepted.

        Raises: ValueError with their names.
        """
        removed, added = sorted(set(before) - self._sources.keys()), sorted(self._sources.keys() - set(before))
        words = [
            f"the source {name!r} was in the mixture of the checkpoint and is not in data.mixture" for name in removed
        ]
        words += [f"the source {name!r} of data.mixture was not in the mixture of the checkpoint" for name in added]
        if words and not self._accepts_changed_data:
            raise ValueError(
                f"{'; '.join(words)}; restore it (with weight = 0 nothing is read from a source), or set "
                "checkpoint.accept_changed_data = true"
            )
        for problem, name in zip(words, removed + added, strict=True):
            effect = (
                "its place is kept, and nothing is read from it" if name in removed else "it is read from its start"
            )
            logger.warning("%s: %s", problem, "it goes on at its place" if name in gone else effect)

    def _check_size(self, name: str, before: int, now: int) -> None:
        words = f"an epoch of the source {name!r} of data.mixture has {now:,} sequences (was {before:,})"
        if before != now and not self._accepts_changed_data:
            raise ValueError(
                f"{words}: its place would refer to other samples; restore its data, tokenizer and holdout, or set "
                "checkpoint.accept_changed_data = true"
            )
        if before != now:
            logger.warning("%s: sequences follow in a new order, and some may come twice in this epoch", words)

    @staticmethod
    def _log_shares(before: Mapping[str, int], now: Mapping[str, int]) -> None:
        changes = [
            f"{name} {now.get(name, 0) / _WHOLE:.4g} (was {before.get(name, 0) / _WHOLE:.4g})"
            for name in dict.fromkeys([*before, *now])
        ]
        logger.warning("the shares of data.mixture change from here on: %s", ", ".join(changes))
