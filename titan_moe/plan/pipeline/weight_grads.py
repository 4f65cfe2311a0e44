"""Which weight gradients a split backward delays, and why it does not delay the others.

The simulated step takes its times from here, and `titan-moe check` its words.
tests/parallel/pipeline/test_weight_grads.py compares the modules of a run with it.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from titan_moe.config.arena import experts_of
from titan_moe.config.formats import GemmFormats
from titan_moe.config.gemms import GemmModule, gemm_modules, why_kept
from titan_moe.config.modules import Region
from titan_moe.config.pipeline_schedules import SCHEDULES
from titan_moe.config.recipe import Recipe
from titan_moe.plan.pipeline.flops import Flops, flops_of_module

OF_HEAD = "its loss computes them in forward"
"""Why the head does not delay, in any recipe."""
NAMES: dict[Region, str] = {
    "dense": "dense layers",
    "experts": "routed experts",
    "shared": "shared experts",
    "latent": "latent projections",
    "mtp": "joins of MTP",
}
"""Regions in words, where they are others."""


class Obstacle(NamedTuple):
    """Why weight gradients are not delayed."""

    reason: str
    way_out: str


def splits_backward(recipe: Recipe) -> bool:
    """Whether the schedule of a recipe computes weight gradients apart."""
    p = recipe.parallel
    return p.pp > 1 and SCHEDULES[p.pp_schedule].splits_backward


def obstacle_of(recipe: Recipe, module: GemmModule) -> Obstacle | None:
    """Why a module does not delay; None if it does. `auto` stands for what it may choose, as in `experts_of`."""
    p, device = recipe.precision, "cpu" if recipe.run.device == "cpu" else "cuda"
    is_rounded = p.gemm_formats(module.part) != GemmFormats() and not why_kept(recipe, module)
    is_compiled = recipe.compile.compiles(device)
    if module.part == "experts":
        experts = recipe.perf.chosen_kernels.experts if device == "cpu" else experts_of(recipe)
        if is_rounded and p.backend == "emulated":
            return Obstacle("in an emulated format", 'precision.experts = "compute"')
        is_compiled = is_compiled and experts != "fused"  # which runs outside of graphs
    elif is_rounded:
        return Obstacle(f'in "{p.format_of(module.part)}"', 'precision.linears = "compute"')
    elif recipe.parallel.tp_comm_overlap and recipe.parallel.tp > 1 and module.row.overlaps:
        return Obstacle("one operation with messages over tp", "parallel.tp_comm_overlap = false")
    elif module.row.region == "latent":
        is_compiled = False
    return Obstacle("in compiled graphs", 'compile.regional = "off"') if is_compiled else None


def split_flops(recipe: Recipe, stages: Iterable[Iterable[str]]) -> list[Flops]:
    """The FLOPs of the actions of each stage, of a token. Weight gradients that are not delayed are computed in
    `backward_input`, those of the head in `forward`, with the gradients of its input."""
    late = {f"layers.{layer}": 0 for layer in range(recipe.model.num_blocks)}
    for module in gemm_modules(recipe.model):
        if obstacle_of(recipe, module) is None:
            late[f"layers.{module.layer}"] += 2 * module.row.multiply_adds

    def of(name: str) -> Flops:
        whole = flops_of_module(recipe, name)
        if name == "head":
            return Flops(whole.total)
        delayed = late.get(name, 0)
        return Flops(whole.forward, whole.backward_input + whole.backward_weight - delayed, delayed)

    return [Flops(*map(sum, zip(Flops(), *map(of, stage), strict=True))) for stage in stages]


def describe_weight_grads(recipe: Recipe) -> Iterator[str]:
    """Say in one line what share of weight gradients is delayed, and why the others are not, with the ways out; nothing
    for a schedule of whole backwards."""
    if not splits_backward(recipe):
        return
    names: dict[Obstacle, list[str]] = {}
    total, late = flops_of_module(recipe, "head").backward_weight, 0.0
    for module in gemm_modules(recipe.model):
        flops, obstacle = 2 * module.row.multiply_adds, obstacle_of(recipe, module)
        total += flops
        if obstacle is None:
            late += flops
        elif (name := NAMES.get(region := module.row.region, region)) not in names.setdefault(obstacle, []):
            names[obstacle].append(name)
    kept = [f"{_listed(parts)} ({why}; delayed with {way_out})" for (why, way_out), parts in names.items()]
    rest = "; ".join([*kept, f"head ({OF_HEAD})"])
    yield f"weight gradients: {100 * late / total:.3g} % delayed, by FLOPs; not those of {rest}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]
