"""The part of a run on each pipeline rank: its layers, and the number of microbatches in flight."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from titan_moe.config.arena import has_arena
from titan_moe.config.gemms import gemm_modules, why_kept
from titan_moe.config.model import ModelConfig
from titan_moe.config.modules import modules_of
from titan_moe.config.offload import offload_of
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import MemoryConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import PartsByLayer, entries_of, recompute_of
from titan_moe.config.train import OptimConfig
from titan_moe.config.trainable import NOTHING, Patterns, names_of, rows_in_order, trains
from titan_moe.plan.cost.count import ParameterCount
from titan_moe.plan.pipeline.flops import flops_of_stage
from titan_moe.plan.pipeline.schedules import Measure, measure_rank
from titan_moe.plan.pipeline.simulation import max_before_backward, max_delayed, max_held, max_messages
from titan_moe.plan.pipeline.slabs import ArenaSlabs, arena_slabs, few_microbatches
from titan_moe.plan.pipeline.stages import stages_of, stages_of_rank
from titan_moe.plan.pipeline.weight_grads import obstacle_of, splits_backward

LAYERS_UNDER_WAY = 2
"""Layers whose tensors are on a GPU on their way to the host, or back (memory/host_copies.py)."""


@dataclass(frozen=True)
class RankPart:
    """The part of a run on one pipeline rank; without a pipeline the whole run."""

    recipe: Recipe
    """The recipe of the run, in which the model has only the layers of this rank."""
    world_size: int  # all ranks of the run
    has_embedding: bool = True
    has_head: bool = True
    num_in_flight: float = 1.0
    """The largest number of microbatches whose activations the rank keeps at a time; those of all its layers count as
    one, those of a half of them as a half."""
    num_before_backward: float = 1.0
    """Of these, in the same way, the largest number whose gradients of activations are not computed yet."""
    num_delayed: float = 0.0
    """Of these, in the same way, the largest number that waits for weight gradients of routed experts."""
    num_messages: int = 0
    """The most buffers of messages to and from other ranks at a time, beside the activations in flight."""
    slabs: ArenaSlabs | None = None
    """The slabs of the rank's arena; None without a pipeline."""
    run: Recipe | None = None
    """The recipe with all layers; None without a pipeline."""
    rank: int = 0  # of the pipeline
    stages: Mapping[int, Sequence[int]] | None = None
    """By stage of the rank the numbers of its layers in the run; None without a pipeline."""

    def has_arena(self, experts: str) -> bool:
        """Whether ranks have an arena with this implementation of the experts: all of a pipeline, or none."""
        return has_arena(self.run or self.recipe, experts)

    @cached_property
    def layers(self) -> list[int]:
        """The numbers of its layers in the run."""
        if self.stages is None:
            return list(range(self.recipe.model.num_blocks))
        return [layer for of_stage in self.stages.values() for layer in of_stage]

    @cached_property
    def _moe_layers(self) -> dict[int, frozenset[int]]:
        """By stage, those with experts."""
        of_moe = frozenset((self.run or self.recipe).model.moe_layers)
        return {at: of_moe.intersection(layers) for at, layers in (self.stages or {}).items()}

    def own_entries(self, again: PartsByLayer) -> tuple[str, ...]:
        """What is computed again of its layers, by their numbers among these alone, if `again` is of the run."""
        return _own_entries(again, self.layers)

    def slabs_with(self, again: PartsByLayer) -> ArenaSlabs | None:
        """The slabs of its arena, in the same way."""
        if self.run is None:
            return None
        without_rows, without_hidden = again.of("experts"), again.of("experts", "moe_act")
        with_rows = {at: len(layers - without_rows) for at, layers in self._moe_layers.items()}
        with_hidden = {at: len(layers - without_hidden) for at, layers in self._moe_layers.items()}
        return arena_slabs(self.run, self.rank, self.world_size, with_rows, with_hidden)

    @cached_property
    def count(self) -> ParameterCount:
        """The parameters of the rank's modules. A tied weight counts on the ranks of the embedding and of the head, but
        only once if both are on one rank."""
        recipe = self.recipe
        return _count(recipe.model, recipe.parallel, recipe.optim.trainable, self.has_embedding, self.has_head)


@lru_cache(maxsize=4096)
def _count(
    model: ModelConfig, parallel: ParallelConfig, patterns: Patterns, has_embedding: bool, has_head: bool
) -> ParameterCount:
    has_embedding = has_embedding or model.mtp.num_layers > 0  # which embeds tokens again
    if model.embeddings_are_tied and not has_embedding:
        model = replace(model, embeddings_are_tied=False)
    lacks = [] if has_embedding else ["embed"]
    lacks += [] if has_head else ["norm", "head"]
    kept = tuple(module for module in modules_of(model, parallel) if module.path not in lacks)
    return ParameterCount(kept, model, patterns)


def parts_of(recipe: Recipe, world_size: int) -> list[RankPart]:
    """The parts of all pipeline ranks."""
    return [part_of(recipe, world_size, rank) for rank in range(recipe.parallel.pp)]


def part_of(recipe: Recipe, world_size: int, rank: int) -> RankPart:
    """The part of one pipeline rank."""
    if recipe.parallel.pp == 1:
        return RankPart(recipe, world_size)
    stages = stages_of(recipe)
    return _part(recipe, world_size, rank, {at: stages[at] for at in stages_of_rank(rank, recipe.parallel)})


def _part(recipe: Recipe, world_size: int, rank: int, stages: Mapping[int, Iterable[str]]) -> RankPart:
    """The part of a pipeline rank with these stages."""
    p, model, names = recipe.parallel, recipe.model, [name for stage in stages.values() for name in stage]
    layers, of_stages = _layers(names), {at: _layers(stage) for at, stage in stages.items()}
    sizes = {at: float(len(of_stage)) for at, of_stage in of_stages.items()}
    experts = (module for module in gemm_modules(model) if module.part == "experts")
    delays = splits_backward(recipe) and any(obstacle_of(recipe, module) is None for module in experts)
    under_way = _under_way(p, few_microbatches(recipe, world_size), rank, tuple(sizes.items()), delays=delays)
    of_precision, of_memory = _precision_of(recipe, layers), _memory_of(recipe, layers)
    own = replace(recipe, model=_with_layers(model, tuple(layers)), precision=of_precision, memory=of_memory)
    part = RankPart(
        replace(own, optim=_optim_of(recipe, layers)),
        world_size,
        "embed" in names,
        "head" in names,
        **under_way,
        run=recipe,
        rank=rank,
        stages=of_stages,
    )
    return replace(part, slabs=part.slabs_with(recompute_of(recipe)))


@lru_cache(maxsize=4096)
def _under_way(
    p: ParallelConfig, few: int, rank: int, sizes: tuple[tuple[int, float], ...], *, delays: bool
) -> dict[str, Any]:
    """The most microbatches of a rank at once, by fields of its part, given the layers of its stages. One of a half of
    the rank's layers is a half."""
    of_stages, number = dict(sizes), max(sum(size for _, size in sizes), 1.0)

    def most(measure: Measure) -> float:
        return measure_rank(measure, p, few, rank, of_stages) / number

    messages = measure_rank(max_messages, p, few, rank, {at: 1.0 for at, size in sizes if size})
    return {
        "num_in_flight": most(max_held),
        "num_before_backward": most(max_before_backward),
        "num_delayed": most(max_delayed) if delays else 0.0,
        "num_messages": round(messages),
    }


@lru_cache(maxsize=4096)
def _with_layers(model: ModelConfig, layers: tuple[int, ...]) -> ModelConfig:
    return model.with_layers(list(layers))


def _precision_of(recipe: Recipe, layers: list[int]) -> PrecisionConfig:
    """The precision of some layers, in which modules without a format have the names of these layers alone."""
    precision = recipe.precision
    if not precision.formats:
        return precision
    kept = tuple(
        f"layers.{layers.index(module.layer)}.{module.path}"
        for module in gemm_modules(recipe.model)
        if module.layer in layers and precision.format_of(module.part) != "compute" and why_kept(recipe, module)
    )
    return replace(precision, modules_in_compute=kept, num_layers_at_start_in_compute=0, num_layers_at_end_in_compute=0)


def _optim_of(recipe: Recipe, layers: list[int]) -> OptimConfig:
    """What trains of some layers, by their numbers among these alone."""
    optim = recipe.optim
    if not optim.trainable:
        return optim
    own = {layer: number for number, layer in enumerate(layers)}
    names = []
    for row, layer in rows_in_order(recipe.model):
        if layer is None or layer in own:
            renamed = names_of(row, layer if layer is None else own[layer])
            both = zip(names_of(row, layer), renamed, strict=True)
            names += [new for (old, _), (new, _) in both if trains(old, optim.trainable)]
    return replace(optim, trainable=tuple(names) or NOTHING)


def _memory_of(recipe: Recipe, layers: list[int]) -> MemoryConfig:
    """What is computed again of some layers, and what the host keeps."""
    parts = recompute_of(recipe), offload_of_stages(recipe)
    recompute, offload = (_own_entries(of_run, layers) for of_run in parts)
    return replace(recipe.memory, recompute=recompute, offload=offload)


def _own_entries(parts: PartsByLayer, layers: list[int]) -> tuple[str, ...]:
    """The entries of parts of some layers, by their numbers among these alone."""
    numbers = {name: [at for at, layer in enumerate(layers) if layer in own] for name, own in parts.layers.items()}
    return entries_of(numbers, len(layers))


def offload_of_stages(recipe: Recipe) -> PartsByLayer:
    """What the host keeps of a recipe. Without a pipeline the last layers keep their tensors, which would not have left
    before backward. With one, the inputs of stages stay, to return their gradients."""
    offload, p, number = offload_of(recipe), recipe.parallel, recipe.model.num_blocks
    if p.pp == 1:
        first = range(number - LAYERS_UNDER_WAY)
        return PartsByLayer({name: layers.intersection(first) for name, layers in offload.layers.items()})
    if "block" not in offload.layers:
        return offload
    inputs = {layer for stage in stages_of(recipe) if "embed" not in stage for layer in _layers(stage)[:1]}
    return PartsByLayer({**offload.layers, "block": offload.layers["block"] - inputs})


def _layers(names: Iterable[str]) -> list[int]:
    return [int(name.removeprefix("layers.")) for name in names if name.startswith("layers.")]


def training_flops_of_rank(recipe: Recipe, pp_rank: int) -> float:
    """Count the FLOPs of training on one token on a pipeline rank."""
    stages = stages_of(recipe)
    return sum(flops_of_stage(recipe, stages[stage]).total for stage in stages_of_rank(pp_rank, recipe.parallel))
