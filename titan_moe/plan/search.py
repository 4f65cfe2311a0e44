"""The search for the fastest layouts of a recipe that fit the memory of a GPU.

Candidates are taken in the order of a bound of their speed: times of layers, shared by all candidates that compute and
send alike, without what a schedule, memory and messages of sharding add. What the bound leaves out is computed for the
best ones, step by step: rules and the peak, the step with its schedule, what "auto" computes again, of which a ladder
tells about as much. A layout is found when none of these is above its speed.
"""

import gc
import heapq
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from types import MappingProxyType
from typing import NamedTuple

from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import AUTO, with_entries
from titan_moe.config.rules import rules_of
from titan_moe.plan.choice.hardware import Hardware, find_hardware
from titan_moe.plan.choice.kernels import as_run_on
from titan_moe.plan.choice.peaks import GROWN_FACTOR
from titan_moe.plan.choice.recompute import choose_recompute
from titan_moe.plan.cost.rates import Rates, rates_of
from titan_moe.plan.cost.step_time import Prediction, predict
from titan_moe.plan.resolved import Resolved
from titan_moe.plan.search_bounds import Bounds
from titan_moe.plan.search_space import Candidate, Layout, candidates_of
from titan_moe.plan.search_trials import Trials, Tried

CHANGED = ("parallel.", "compile.", "memory.recompute", "train.micro_batch_sequences")
"""Fields of candidates."""


@dataclass(frozen=True)
class Found:
    """A layout with its best options."""

    candidate: Candidate
    recipe: Recipe
    """With memory.recompute as the search was given it, or "auto"."""
    resolved: Resolved
    prediction: Prediction
    peak_gib: float
    entries: tuple[str, ...]
    """What is computed again."""


class _Ahead(NamedTuple):
    """A candidate that passes the rules and fits, on its way."""

    tried: Tried
    speed: float = 0.0
    """Where it just fits; 0 while only its bound is known."""
    found: Found | None = None
    """With what "auto" chooses; None before it is asked."""


@dataclass(frozen=True)
class Result:
    """What a search found."""

    found: list[Found]
    num_candidates: int
    num_tried: int
    refusal: str = ""
    """A breach of a rule, if all candidates that were tried have one."""


def search(
    recipe: Recipe, world_size: int, gpu: str, top: int = 10, fixed: Mapping[str, object] = MappingProxyType({})
) -> Result:
    """Find the fastest layouts, each with its best options; fewer than `top` if fewer fit. `fixed` has values of fields
    of `[parallel]` and of train.micro_batch_sequences, by their last words, that all layouts must have.

    Raises: ValueError for an unknown GPU.
    """
    rates, hardware = rates_of(gpu), find_hardware(gpu)
    if rates is None or hardware is None:
        raise ValueError(f"{gpu} is not a known GPU")
    with _no_collection():
        return _Search(recipe, world_size, rates, hardware, fixed).run(top)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Spare scans of thousands of candidates, none of which is garbage: a tenth of a search."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def fewest_ranks(recipe: Recipe, most: int, gpu: str, fixed: Mapping[str, object]) -> tuple[int, Result]:
    """The fewest GPUs that hold a step, of powers of two and one and a half times these, and their best layout; nothing
    if even `most` do not."""
    powers = [2**power for power in range(most.bit_length())]
    numbers = sorted({number for power in powers for number in (power, power * 3 // 2) if 0 < number < most} | {most})
    for number in numbers:
        result = search(recipe, number, gpu, 1, fixed)
        if result.found:
            break
    return number, result


def _breach_of_all(recipe: Recipe, world_size: int) -> str:
    """A breach of a rule by fields that no candidate changes, or any of a step without tokens; empty without one."""
    is_empty = min(recipe.train.seq_len_tokens, recipe.train.global_batch_sequences) < 1
    for rule in rules_of(recipe):
        if is_empty or not any(field.startswith(CHANGED) for field in rule.fields):
            for breach in rule.breaches(recipe, world_size):
                return str(breach)
    return ""


def _between(fast: float, slow: float, share: float) -> float:
    """A speed between two, by the share of the time that lies between them."""
    return 1 / ((1 - share) / fast + share / slow)


class _Search:
    def __init__(
        self, recipe: Recipe, world_size: int, rates: Rates, hardware: Hardware, fixed: Mapping[str, object]
    ) -> None:
        self.recipe, self.world_size, self.rates, self.hardware = recipe, world_size, rates, hardware
        self.fixed, self.limit = fixed, hardware.free_gib(recipe.run.ranks_per_gpu)
        self.smallest: dict[Candidate, Candidate] = {}
        self.bounds = Bounds(recipe, world_size, rates, self.limit)
        self.trials = Trials(recipe, world_size, hardware, self.smallest)
        self.num_candidates = 0

    def run(self, top: int) -> Result:
        """The best layouts first; none of a recipe that no layout mends, of which nothing is counted."""
        if refusal := _breach_of_all(self.recipe, self.world_size):
            return Result([], 0, 0, refusal)
        found = sorted(islice(self._in_order(), top), key=lambda one: -one.prediction.tokens_per_second)
        refusal = "" if self.trials.is_allowed else self.trials.refusal
        return Result(found, self.num_candidates, self.trials.number, refusal)

    def _in_order(self) -> Iterator[Found]:
        ticket = count()
        queue: list[tuple[float, int, Candidate, _Ahead | None]] = []

        def push(speed: float, candidate: Candidate, so_far: _Ahead | None) -> None:
            heapq.heappush(queue, (-speed, next(ticket), candidate, so_far))

        for candidate in candidates_of(self.recipe, self.world_size):
            if any(candidate.value_of(name) not in (value, None) for name, value in self.fixed.items()):
                continue
            self.num_candidates += 1
            smallest = self.smallest.setdefault(candidate.family, candidate)
            if candidate.micro_batch_sequences < smallest.micro_batch_sequences:
                self.smallest[candidate.family] = candidate
            if self.bounds.may_fit(candidate):
                push(self.bounds.speed(candidate), candidate, None)
        done = set[Layout]()
        while queue:
            _, _, candidate, so_far = heapq.heappop(queue)
            if candidate.layout in done:
                continue
            if so_far is None:
                if tried := self.trials.attempt(candidate):
                    ends = (self.bounds.speed(candidate, tried.fewer), self.bounds.speed(candidate, tried.entries))
                    push(_between(*ends, tried.share), candidate, _Ahead(tried))
            elif so_far.speed == 0.0:
                tried = so_far.tried
                speed = self._predicted(candidate, tried.recipe, tried.entries)[1].tokens_per_second
                fast, slow = (self.bounds.speed(candidate, it) for it in (tried.fewer, tried.entries))
                speed *= _between(fast / slow, 1.0, tried.share)
                push(speed, candidate, so_far._replace(speed=speed))
            elif so_far.found is None:
                if finished := self._finish(candidate, so_far.tried):
                    push(finished.prediction.tokens_per_second, candidate, so_far._replace(found=finished))
            else:
                done.add(candidate.layout)
                yield so_far.found

    def _finish(self, candidate: Candidate, tried: Tried) -> Found | None:
        """A candidate with what "auto" computes again; None if a pipeline rank does not fit after all."""
        recipe, entries = tried.recipe, tried.entries
        if entries and AUTO in self.recipe.memory.recompute:
            choice = choose_recompute(self._as_run(recipe), self.world_size, self.hardware)
            entries = choice.entries
        resolved, prediction = self._predicted(candidate, recipe, entries)
        gib = self._peak_gib(resolved)
        return Found(candidate, recipe, resolved, prediction, gib, entries) if gib <= self.limit else None

    def _resolved(self, recipe: Recipe, entries: tuple[str, ...]) -> Resolved:
        return Resolved(self._as_run(with_entries(recipe, entries)), self.world_size)

    def _as_run(self, recipe: Recipe) -> Recipe:
        return as_run_on(recipe, self.world_size, self.hardware)

    def _peak_gib(self, resolved: Resolved) -> float:
        """Of all pipeline ranks."""
        factor = resolved.recipe.parallel.fixed_capacity_factor or GROWN_FACTOR
        return (resolved.peak_bytes(factor) + resolved.outside_bytes) / 2**30

    def _predicted(self, candidate: Candidate, recipe: Recipe, entries: tuple[str, ...]) -> tuple[Resolved, Prediction]:
        resolved = self._resolved(recipe, entries)
        return resolved, predict(resolved, self.rates, layers=self.bounds.layers(candidate, entries))
