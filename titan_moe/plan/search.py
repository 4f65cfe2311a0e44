"""The search for the fastest layouts of a recipe that fit the memory of a GPU.

Candidates are taken in the order of a bound of their speed: times of layers, shared by all candidates that compute and
send alike, without what a schedule, memory and messages of sharding add. What the bound leaves out is computed for the
best ones, step by step: rules and the peak, the step with its schedule, what "auto" computes again, of which a ladder
tells about as much. A layout is found when none of these is above its speed.
"""

import gc
import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from types import MappingProxyType
from typing import NamedTuple

from titan_moe.config.clones import resolve_clones
from titan_moe.config.parallel import ranks_of_a_node
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import AUTO
from titan_moe.config.rules import check_rules, rules_of
from titan_moe.config.trainable import trains_all
from titan_moe.plan.choice.hardware import Hardware, find_hardware
from titan_moe.plan.choice.recompute import GROWN_FACTOR, choose_recompute, with_entries
from titan_moe.plan.cost.block_time import Times, head_times, layer_times
from titan_moe.plan.cost.count import count_parameters
from titan_moe.plan.cost.messages import sharding_exposed
from titan_moe.plan.cost.peak import peak_bytes
from titan_moe.plan.cost.rates import Rates, rates_of
from titan_moe.plan.cost.step_time import (
    COPIES,
    GAPS_OF_A_GRAPH,
    SPREAD,
    Prediction,
    largest_of,
    predict,
    usual_load,
)
from titan_moe.plan.pipeline.parts import part_of
from titan_moe.plan.resolved import Resolved
from titan_moe.plan.search_space import Candidate, Layout, candidates_of

LADDER = (
    (),
    ("norms", "qkv_rope", "mla_up"),
    ("norms", "expert_weights"),
    ("norms", "moe_act", "shared_experts", "dense_mlp"),
    ("norms", "experts", "shared_experts", "dense_mlp"),
    ("qkv_rope", "mla_up", "norms", "experts", "shared_experts", "dense_mlp", "attention"),
    ("block",),
)
"""What is computed again while layouts are compared; for those that are found "auto" is asked."""
OF_EXPERTS = 3
"""The step of the ladder from which experts are computed again."""
CHANGED = ("parallel.", "compile.", "memory.recompute", "train.micro_batch_sequences")
"""Fields of candidates."""
FILL = {"1f1b": 1.0, "interleaved_1f1b": 1.0, "zbv": 0.1, "dualpipev": 0.3}
"""By schedule, of the waits of a pipeline that fills and drains, what its best case leaves."""


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


class _Tried(NamedTuple):
    """A candidate that passes the rules and fits."""

    recipe: Recipe
    entries: tuple[str, ...]
    fewer: tuple[str, ...]
    """What is computed again on the step of the ladder before, with which it does not fit: "auto" is between both."""
    share: float
    """Where between both it just fits, by memory."""
    speed: float = 0.0
    """There; 0 while only its bound is known."""
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
        self.fixed, self.refusal, self.is_allowed = fixed, "", False
        self.recipe, self.world_size, self.rates, self.hardware = recipe, world_size, rates, hardware
        self.limit = hardware.free_gib(recipe.run.ranks_per_gpu)
        self.tokens = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens / world_size
        parameters = count_parameters(recipe.model)
        self.num_experts = parameters["experts"]
        self.num_dense = parameters.total - self.num_experts
        precision = recipe.precision
        kept = (BYTES_OF_DTYPE[precision.master], BYTES_OF_DTYPE[precision.gradients_dtype])
        self.state = sum(kept) + (precision.bytes_of_moments if recipe.memory.park == "none" else 0.0)
        self.update = 2 * kept[0] + 2 * kept[1] + 2 * precision.bytes_of_moments
        self.trains_all = trains_all(recipe.model, recipe.optim.trainable)
        self.microbatches: dict[tuple[object, ...], float] = {}
        self.layers: dict[tuple[object, ...], Sequence[Times]] = {}
        self.of_node = ranks_of_a_node(world_size)
        self.smallest: dict[Candidate, Candidate] = {}
        self.fits: dict[Candidate, bool] = {}
        self.repeats: dict[tuple[object, ...], bool] = {}
        self.num_candidates = self.num_tried = 0

    def run(self, top: int) -> Result:
        """The best layouts first; none of a recipe that no layout mends, of which nothing is counted."""
        if refusal := _breach_of_all(self.recipe, self.world_size):
            return Result([], 0, 0, refusal)
        found = sorted(islice(self._in_order(), top), key=lambda one: -one.prediction.tokens_per_second)
        return Result(found, self.num_candidates, self.num_tried, "" if self.is_allowed else self.refusal)

    def _in_order(self) -> Iterator[Found]:
        ticket = count()
        queue: list[tuple[float, int, Candidate, _Tried | None]] = []

        def push(speed: float, candidate: Candidate, so_far: _Tried | None) -> None:
            heapq.heappush(queue, (-speed, next(ticket), candidate, so_far))

        for candidate in candidates_of(self.recipe, self.world_size):
            if any(candidate.value_of(name) not in (value, None) for name, value in self.fixed.items()):
                continue
            self.num_candidates += 1
            smallest = self.smallest.setdefault(candidate.family, candidate)
            if candidate.micro_batch_sequences < smallest.micro_batch_sequences:
                self.smallest[candidate.family] = candidate
            if self._may_fit(candidate):
                push(self._bound(candidate), candidate, None)
        done = set[Layout]()
        while queue:
            _, _, candidate, so_far = heapq.heappop(queue)
            if candidate.layout in done:
                continue
            if so_far is None:
                if tried := self._try(candidate):
                    ends = (self._bound(candidate, tried.fewer), self._bound(candidate, tried.entries))
                    push(_between(*ends, tried.share), candidate, tried)
            elif so_far.speed == 0.0:
                speed = self._predicted(candidate, so_far.recipe, so_far.entries)[1].tokens_per_second
                fast, slow = (self._bound(candidate, it) for it in (so_far.fewer, so_far.entries))
                speed *= _between(fast / slow, 1.0, so_far.share)
                push(speed, candidate, so_far._replace(speed=speed))
            elif so_far.found is None:
                if finished := self._finish(candidate, so_far):
                    push(finished.prediction.tokens_per_second, candidate, so_far._replace(found=finished))
            else:
                done.add(candidate.layout)
                yield so_far.found

    def _may_fit(self, candidate: Candidate) -> bool:
        """Whether what is held for a whole step may fit; stages are taken as equal."""
        layout = candidate.layout
        if not self.trains_all:
            return True
        held = self._parameters(layout) * self.state
        if candidate.accumulate_unsharded:
            dense = self.num_dense / layout.tp / layout.pp
            held += dense * 2.0 + dense * (4.0 if candidate.num_microbatches > 1 else 0.0)
            of_replica = self.world_size // (layout.pp * layout.ep * layout.etp)
            if of_replica > 1:
                held += self.num_experts / (layout.pp * layout.ep * layout.etp) * 6.0
        return held / 2**30 < 1.05 * self.limit

    def _parameters(self, layout: Layout) -> float:
        return (self.num_dense + self.num_experts) * layout.dp_replicate / self.world_size

    def _bound(self, candidate: Candidate, entries: tuple[str, ...] = ()) -> float:
        """Tokens a second that a candidate does not exceed, up to what the mean over stages hides."""
        layout, number = candidate.layout, candidate.num_microbatches
        of_one = self._microbatch(candidate, entries)
        fill = FILL[candidate.pp_schedule] * (layout.pp - 1) / candidate.vpp
        times = 1 if candidate.accumulate_unsharded else number
        gathered = self.num_dense / layout.tp / layout.pp * COPIES * times
        seconds = of_one * (number + fill)
        if self.trains_all:
            seconds += (self._parameters(layout) * self.update + gathered) / self.rates.memory
            messages, in_node = self._sharding(layout)
            seconds += sharding_exposed(messages * times, seconds, in_node * times)
        return self.tokens / (seconds * (1 + GAPS_OF_A_GRAPH))

    def _sharding(self, layout: Layout) -> tuple[float, float]:
        """Seconds of gathering and reducing all parameters once, and over links of a node: as in `step_time`, with one
        gather."""
        of_stage = self.world_size // layout.pp
        of_experts, of_dense = layout.ep * layout.etp, layout.tp
        seconds = received = 0.0
        for number, group in ((self.num_experts, of_experts), (self.num_dense, of_dense)):
            shards = of_stage // group // layout.dp_replicate
            rate = self.rates.link
            if of_stage > self.of_node:
                rate = min(rate, max(self.of_node // group, 1) * self.rates.node_link)
            size = number / layout.pp / group * (1 - 1 / max(shards, 1)) * 6
            seconds, received = seconds + size / rate, received + size
        return seconds, received / self.rates.link

    def _microbatch(self, candidate: Candidate, entries: tuple[str, ...]) -> float:
        """Seconds of a microbatch on a pipeline rank, with these parts computed again."""
        layout = candidate.layout
        key = (*self._key(candidate, entries), layout.pp)
        if key not in self.microbatches:
            layers, head = self._layers(candidate, entries), head_times(candidate.of(self.recipe), self.rates)
            of_layers = [sum(part.total for part in of_layer.values()) for of_layer in layers]
            mean = (sum(of_layers) + sum(part.total for part in head.values())) / layout.pp
            most = -(-len(of_layers) // layout.pp) * min(of_layers, default=0.0)  # of a rank that has most layers
            self.microbatches[key] = max(mean, most) * (1 + SPREAD * largest_of(layout.ep * layout.etp))
        return self.microbatches[key]

    def _layers(self, candidate: Candidate, entries: tuple[str, ...]) -> Sequence[Times]:
        """The times of layers, which candidates share that compute and send alike."""
        key = self._key(candidate, entries)
        if key not in self.layers:
            recipe = with_entries(candidate.of(self.recipe), entries)
            self.layers[key] = layer_times(recipe, self.world_size, self.rates, usual_load(recipe))
        return self.layers[key]

    def _key(self, candidate: Candidate, entries: tuple[str, ...]) -> tuple[object, ...]:
        of_layout = candidate.layout[1:5]
        return (of_layout, candidate.micro_batch_sequences, candidate.dispatcher, candidate.overlap, entries)

    def _try(self, candidate: Candidate) -> "_Tried | None":
        """What a candidate computes again, if it passes the rules and fits."""
        if not self._family_fits(candidate):
            return None
        self.num_tried += 1
        if (recipe := self._allowed(candidate)) is None:
            return None
        given = self.recipe.memory.recompute
        if AUTO not in given:
            return _Tried(recipe, tuple(given), tuple(given), 1.0)
        gibs: dict[int, float] = {}
        rung = self._rung(recipe, gibs, is_known=candidate == self.smallest[candidate.family])
        if rung is None:
            return None
        if not rung:
            return _Tried(recipe, LADDER[0], LADDER[0], 1.0)
        if not self._may_repeat(candidate, recipe, rung):
            return None
        without, with_them = (self._gib_of(recipe, gibs, step) for step in (rung - 1, rung))
        share = min((without - self.limit) / max(without - with_them, 1e-9), 1.0)
        return _Tried(recipe, LADDER[rung], LADDER[rung - 1], share)

    def _family_fits(self, candidate: Candidate) -> bool:
        """Whether the smallest microbatch fits with all computed again."""
        family = candidate.family
        if family not in self.fits:
            smallest = self._allowed(self.smallest[family])
            again = LADDER[-1] if AUTO in self.recipe.memory.recompute else self.recipe.memory.recompute
            self.fits[family] = smallest is None or self._fits(smallest, tuple(again))
        return self.fits[family]

    def _allowed(self, candidate: Candidate) -> Recipe | None:
        """The recipe of a candidate, launched if it cannot be captured; None if it breaks a rule."""
        recipe = candidate.of(self.recipe)
        launched = replace(recipe, compile=replace(recipe.compile, cudagraph="off"))
        for way in dict.fromkeys((recipe, launched)):
            if not (breaches := check_rules(way, self.world_size)):
                self.is_allowed = True
                return way
            self.refusal = breaches[0]
        return None

    def _rung(self, recipe: Recipe, gibs: dict[int, float], *, is_known: bool) -> int | None:
        """The first of the ladder with which a step fits; of the last `is_known` that it does."""
        few, many = 0, len(LADDER) - 1
        if not is_known and self._gib_of(recipe, gibs, many) > self.limit:
            return None
        while few < many:
            middle = (few + many) // 2
            if self._gib_of(recipe, gibs, middle) <= self.limit:
                many = middle
            else:
                few = middle + 1
        return many

    def _may_repeat(self, candidate: Candidate, recipe: Recipe, step: int) -> bool:
        """Whether rules allow this step of the ladder with the schedule and the overlap: blocks in pieces refuse norms,
        and split backwards blocks, and experts as these. All models have both; what else a step names, some lack."""
        probe = LADDER[-1] if step >= OF_EXPERTS else ("norms",)
        options = candidate.pp_schedule, candidate.overlap, candidate.dispatcher, candidate.layout.pp > 1, probe
        if options not in self.repeats:
            self.repeats[options] = not check_rules(with_entries(recipe, probe), self.world_size)
        return self.repeats[options]

    def _gib_of(self, recipe: Recipe, gibs: dict[int, float], step: int) -> float:
        """The memory on a step of the ladder; `gibs` has those that are known."""
        if step not in gibs:
            gibs[step] = self._gib(recipe, LADDER[step])
        return gibs[step]

    def _finish(self, candidate: Candidate, tried: _Tried) -> Found | None:
        """A candidate with what "auto" computes again; None if a pipeline rank does not fit after all."""
        recipe, entries = tried.recipe, tried.entries
        if entries and AUTO in self.recipe.memory.recompute:
            choice = choose_recompute(resolve_clones(recipe, self.world_size), self.world_size, self.hardware)
            entries = choice.entries
        resolved, prediction = self._predicted(candidate, recipe, entries)
        gib = self._peak_gib(resolved)
        return Found(candidate, recipe, resolved, prediction, gib, entries) if gib <= self.limit else None

    def _resolved(self, recipe: Recipe, entries: tuple[str, ...]) -> Resolved:
        return Resolved(resolve_clones(with_entries(recipe, entries), self.world_size), self.world_size)

    def _peak_gib(self, resolved: Resolved) -> float:
        """Of all pipeline ranks."""
        factor = resolved.recipe.parallel.fixed_capacity_factor or GROWN_FACTOR
        return (resolved.peak_bytes(factor) + resolved.outside_bytes) / 2**30

    def _predicted(self, candidate: Candidate, recipe: Recipe, entries: tuple[str, ...]) -> tuple[Resolved, Prediction]:
        resolved = self._resolved(recipe, entries)
        return resolved, predict(resolved, self.rates, layers=self._layers(candidate, entries))

    def _fits(self, recipe: Recipe, entries: tuple[str, ...]) -> bool:
        """Whether the first and the last pipeline rank fit; `_finish` asks the others."""
        return self._gib(recipe, entries) <= self.limit

    def _gib(self, recipe: Recipe, entries: tuple[str, ...]) -> float:
        """The memory that the first or the last pipeline rank needs, whichever needs more."""
        recipe = resolve_clones(with_entries(recipe, entries), self.world_size)
        pp = recipe.parallel.pp
        resolved = Resolved(recipe, self.world_size)
        factor = recipe.parallel.fixed_capacity_factor or GROWN_FACTOR
        parts = (part_of(recipe, self.world_size, rank) for rank in dict.fromkeys((0, pp - 1)))
        peak = max(peak_bytes(part, factor, resolved.experts) for part in parts)
        return (peak + resolved.outside_bytes) / 2**30
