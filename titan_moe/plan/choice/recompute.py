"""What `memory.recompute = "auto"` means on a GPU: the cheapest parts to compute again with which a step fits.

Parts are taken in the order of what they cost for what they free, on the pipeline ranks that need it, and each in as
few of their last layers as will do. The peak says what a part frees (plan/cost/peak.py), the table of modules what it
costs: FLOPs that are repeated, and bytes that are written and read again.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

from titan_moe.config.modules import modules_of
from titan_moe.config.parallel import resolve
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe, microbatch_tokens, num_microbatches
from titan_moe.config.recompute import AUTO, RECOMPUTABLE, PartsByLayer, entries_of, with_entries
from titan_moe.config.rules import check_rules
from titan_moe.config.schema import counted
from titan_moe.plan.choice.hardware import Hardware
from titan_moe.plan.choice.peaks import Peaks
from titan_moe.plan.cost.count import attention_core_flops_per_token
from titan_moe.plan.cost.loads import layer_loads
from titan_moe.plan.pipeline.stages import stages_of, stages_of_rank

GEMM_SHARE, MEMORY_SHARE, LINK_SHARE = 0.6, 0.4, 0.6
"""Of the peak rates: what GEMMs, passes over memory beside their launches, and reads of peers reach."""
OF_EXPERTS = ("expert_weights", "moe_act", "experts")
Layers = Mapping[str, frozenset[int]]
Plan = tuple[dict[str, frozenset[int]], list[float]]
"""What is computed again, and the peak of each pipeline rank."""
Option = tuple[str, float, float]
"""A part, GiB that it frees in all layers, and what it costs in ms."""


@dataclass(frozen=True)
class Choice:
    """What is computed again."""

    entries: tuple[str, ...]
    gib: float  # the peak of the rank that needs most, with room for the load to grow
    limit_gib: float
    room: str  # the limit in words
    rows: tuple[str, ...]  # a line for each part, with what it frees and costs

    def lines(self) -> list[str]:
        """In words."""
        if not self.entries:
            return [f"nothing: {self.gib:.3g} GiB at the peak of a step fit {self.room}"]
        verdict = "fit" if self.fits else "do NOT fit"
        return [*self.rows, f"with them {self.gib:.3g} GiB at the peak of a step {verdict} {self.room}"]

    @property
    def fits(self) -> bool:
        """Whether a step fits with it."""
        return self.gib <= self.limit_gib


def is_auto(recipe: Recipe) -> bool:
    """Whether the choice is left to the plan."""
    return AUTO in recipe.memory.recompute


def choose_recompute(recipe: Recipe, world_size: int, hardware: Hardware) -> Choice:
    """The cheapest parts with which a step fits; where none fits, those with the lowest peak."""
    return _Search(recipe, world_size, hardware).choose()


class _Search:
    def __init__(self, recipe: Recipe, world_size: int, hardware: Hardware) -> None:
        self.recipe, self.world_size, self.hardware = with_entries(recipe, ()), world_size, hardware
        self.limit = hardware.free_gib(recipe.run.ranks_per_gpu)
        self.room = hardware.room("", recipe.run.ranks_per_gpu)
        self.number = recipe.model.num_blocks
        self.peaks = Peaks(self.recipe, world_size)
        self._layers = lru_cache(None)(self._layers_with)

    def gib(self, layers: Layers) -> list[float]:
        """The peak of each pipeline rank."""
        return self.peaks.gib(PartsByLayer(layers))

    def choose(self) -> Choice:
        """The cheapest of the plans that fit; else the one with the lowest peak."""
        base = self.gib({})
        if max(base) <= self.limit:
            return Choice((), max(base), self.limit, self.room, ())
        options = self._options(base)
        names = [name for name, *_ in options]
        plans = [self._take(options, {heavy, other}) for heavy in ("experts", "moe_act") for other in ("", *names)]
        blocks = {"block": self._layers("block")}
        if self._is_allowed(blocks):
            plans.append((blocks, self.gib(blocks)))
        layers, peaks = min(plans, key=lambda plan: (max(max(plan[1]) - self.limit, 0), self._cost_of(plan[0])))
        for name in reversed(names):  # of what was taken before the last less may do now
            if name in layers and max(peaks) <= self.limit:
                layers, peaks = self._fewest(layers, name)
        freed = {"block": max(base) - max(peaks), **{name: gib for name, gib, _ in options}}
        rows = []
        for name, chosen in layers.items():
            share = self._share(name, chosen)
            frees, costs = f"{freed[name] * share:.2g} GiB", f"{self.cost_ms(name) * share:.2g} ms a step"
            rows.append(f"{name} in {counted(len(chosen), 'layer')}: frees {frees}, costs about {costs}")
        return Choice(entries_of(layers, self.number), max(peaks), self.limit, self.room, tuple(rows))

    def _take(self, options: list[Option], without: Collection[str]) -> Plan:
        """Options in their order, on the ranks that need it, until a step fits; the last in as few layers as do."""
        chosen: dict[str, frozenset[int]] = {}
        peaks = self.gib(chosen)
        for name, *_ in options:
            over = [rank for rank, gib in enumerate(peaks) if gib > self.limit]
            if not over or name in without:
                continue
            layers = frozenset[int]().union(*(self._layers(name, rank) for rank in over))
            if not layers:
                continue
            chosen[name] = layers
            peaks = self.gib(chosen)
            if max(peaks) <= self.limit:
                return self._fewest(chosen, name)
        return chosen, peaks

    def _cost_of(self, layers: Layers) -> float:
        return sum(self.cost_ms(name) * self._share(name, chosen) for name, chosen in layers.items())

    def _share(self, name: str, chosen: frozenset[int]) -> float:
        return len(chosen) / max(len(self._layers(name)), 1)

    def _options(self, before: list[float]) -> list[Option]:
        """Parts with what they free of all layers on the rank that has most, and cost; the cheapest first."""
        options = []
        for name in RECOMPUTABLE:
            layers = self._layers(name)
            overwrites_clones = name == "expert_weights" and self.recipe.parallel.has_clones
            if name == "block" or overwrites_clones or not layers or not self._is_allowed({name: layers}):
                continue
            freed = max(was - now for was, now in zip(before, self.gib({name: layers}), strict=True))
            if freed > 0.01:
                options.append((name, freed, self.cost_ms(name)))
        return sorted(options, key=lambda option: option[2] / option[1])

    def _fewest(self, layers: Layers, name: str) -> Plan:
        """The same with the fewest of the last layers of each pipeline rank that still fit, of those with a part."""
        own = [sorted(self._layers(name, rank) & layers[name]) for rank in range(self.recipe.parallel.pp)]
        few, many = [0] * len(own), list(map(len, own))

        def with_last(numbers: list[int]) -> dict[str, frozenset[int]]:
            last = (
                layer
                for of_rank, number in zip(own, numbers, strict=True)
                for layer in of_rank[-number or len(of_rank) :]
            )
            return {key: chosen for key, chosen in {**layers, name: frozenset(last)}.items() if chosen}

        while few != many:
            middle = [(least + most) // 2 for least, most in zip(few, many, strict=True)]
            for rank, gib in enumerate(self.gib(with_last(middle))):
                if gib <= self.limit:
                    many[rank] = middle[rank]
                elif few[rank] < many[rank]:
                    few[rank] = middle[rank] + 1
        chosen = with_last(many)
        return chosen, self.gib(chosen)

    def _is_allowed(self, layers: Layers) -> bool:
        return not check_rules(with_entries(self.recipe, entries_of(layers, self.number)), self.world_size)

    def _layers_with(self, name: str, rank: int | None = None) -> frozenset[int]:
        """The layers that have a part, of all or of a pipeline rank."""
        model, parallel = self.recipe.model, self.recipe.parallel
        of_rank = list(range(self.number))
        if rank is not None and parallel.pp > 1:
            stages = stages_of(self.recipe)
            names = [name for stage in stages_of_rank(rank, parallel) for name in stages[stage]]
            of_rank = [int(name.removeprefix("layers.")) for name in names if name.startswith("layers.")]
        if name == "block":
            return frozenset(of_rank)
        rows = modules_of(model, parallel)
        having = [
            row.layers or () for row in rows if row.freed_by([name]) or (name in OF_EXPERTS and row.region == "experts")
        ]
        return frozenset[int]().union(*having).intersection(of_rank)

    def cost_ms(self, name: str) -> float:
        """The time of a step that a part costs in all layers."""
        recipe, hardware = self.recipe, self.hardware
        m, sizes = recipe.model, resolve(recipe.parallel, self.world_size)
        element, parameter = (BYTES_OF_DTYPE[it] for it in (recipe.precision.compute, recipe.precision.parameters))
        gemms, passes, weights = 0.0, 0.0, 0.0
        for row in modules_of(m, recipe.parallel):
            freed, is_block = row.freed_by([name]), name == "block" and row.layers is not None
            if (
                is_block
                or (freed and row.multiply_adds)
                or (name in ("moe_act", "experts") and row.region == "experts")
            ):
                share = 2 / 3 if name in OF_EXPERTS else 1  # of an expert's matrices, gate and up
                gemms += 2 * share * row.number * row.multiply_adds
            else:  # written, and read
                passes += 2 * row.number * freed * element
            if (freed or is_block) and row.pair_width and name in ("attention", "block"):
                gemms += attention_core_flops_per_token(m, recipe.train.seq_len_tokens) / 3
            if name == "expert_weights" and row.region == "experts":
                weights += row.number * row.own_parameters * (parameter + element)
        microbatches = num_microbatches(recipe, self.world_size)
        of_memory = MEMORY_SHARE * hardware.memory_bytes_per_second
        of_token = gemms / (GEMM_SHARE * hardware.bf16_flops) + passes / of_memory
        seconds = microbatches * (of_token * microbatch_tokens(recipe) + weights / (2 * of_memory))
        if name == "experts" and recipe.parallel.facts.shares_memory_of_ep:  # rows are got again, half beside a GEMM
            rows = layer_loads(recipe).rows * m.num_moe_layers * m.expert_width * element
            seconds += microbatches * rows / (2 * LINK_SHARE * hardware.link_bytes_per_second)
        return 1e3 * seconds / sizes.pp
