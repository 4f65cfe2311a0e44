"""The rows of `titan-moe check` about a pipeline."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from titan_moe.config.pipeline_schedules import SCHEDULES
from titan_moe.config.rules import check_rules
from titan_moe.config.trainable import passes_of, trains_all
from titan_moe.plan.cost.memory import state_bytes
from titan_moe.plan.cost.peak import peak_bytes
from titan_moe.plan.pipeline.action import Action, Pair, flat
from titan_moe.plan.pipeline.flops import flops_of_stage
from titan_moe.plan.pipeline.simulation import Simulation, Times, simulate
from titan_moe.plan.pipeline.weight_grads import describe_weight_grads, split_flops
from titan_moe.plan.resolved import Resolved


def simulate_step(resolved: Resolved, *, delays_all: bool = False) -> Simulation:
    """Simulate a step of a recipe; times are FLOPs of a token. With `delays_all`, as if every weight gradient could be
    delayed; else those that the run does not delay are computed where it computes them."""
    recipe, stages = resolved.recipe, resolved.stages
    flops = [flops_of_stage(recipe, stage) for stage in stages] if delays_all else split_flops(recipe, stages)
    forward, backward_input, backward_weight = zip(*flops, strict=True)
    return simulate(resolved.actions, Times(forward, backward_input, backward_weight))


def describe_pipeline(resolved: Resolved, capacity_factor: float) -> Iterator[str]:
    """The schedule with its bubble, then the stages, microbatches in flight and memory of each pipeline rank; nothing
    without a pipeline."""
    p = resolved.recipe.parallel
    if p.pp == 1:
        return
    of_a_rank = f", {p.vpp} on a rank" if p.vpp > 1 else ""
    stages, bubble = resolved.stages, simulate_step(resolved).bubble_share
    ideal = ""
    if resolved.splits_backward:
        smallest = simulate_step(resolved, delays_all=True).bubble_share
        ideal = f" ({100 * smallest:.3g} % if all weight gradients were delayed)"
    yield (
        f"{p.pp_schedule}, {len(stages)} stages{of_a_rank}, {resolved.num_microbatches} microbatches a step; "
        f"bubble {100 * bubble:.3g} % of the step, by FLOPs, without messages and recompute{ideal}"
    )
    yield from describe_weight_grads(resolved.recipe)
    yield from _better_schedules(resolved, bubble)
    for stage in frozen_stages(resolved):
        yield (
            f"WARNING: all parameters of {name_modules(stage)} are frozen, and a run refuses a stage that no gradient "
            "passes; take fewer stages, or parallel.pp = 1"
        )
    for rank, part in enumerate(resolved.parts):
        held = " + ".join(name_modules(stages[stage]) for stage in resolved.stages_of_rank(rank))
        memory = f"{state_bytes(part) / 2**30:.3g} GiB"
        if resolved.recipe.run.device != "cpu":
            peak = peak_bytes(part, capacity_factor, resolved.experts) + resolved.outside_bytes
            memory += f", about {peak / 2**30:.3g} GiB at the peak"
        pairs = f"; {name_pairs(resolved.actions[rank])}" if p.overlap == "microbatch" else ""
        yield f"pp rank {rank}: {held}; microbatches in flight {part.num_in_flight:.3g}{pairs}; {memory}"


def frozen_stages(resolved: Resolved) -> Iterator[Sequence[str]]:
    """The stages in which nothing trains, by the table of modules."""
    model, patterns = resolved.recipe.model, resolved.recipe.optim.trainable
    if trains_all(model, patterns):
        return
    trained = set[str]()
    for (path, layer), passes in passes_of(model, patterns).items():
        if passes.share > 0:
            trained.add(path.partition(".")[0] if layer is None else f"layers.{layer}")
    yield from (stage for stage in resolved.stages if stage and trained.isdisjoint(stage))


def _better_schedules(resolved: Resolved, bubble: float) -> Iterator[str]:
    """Say which schedules of whole backwards have a smaller bubble than one of split backwards, whose weight gradients
    are not all delayed."""
    if not resolved.splits_backward:
        return
    recipe, p = resolved.recipe, resolved.recipe.parallel
    for name, facts in SCHEDULES.items():
        vpp = min(max(p.vpp, facts.min_vpp), facts.max_vpp)
        changes: dict[str, Any] = {"pp_schedule": name, "vpp": vpp}
        other = replace(resolved, recipe=replace(recipe, parallel=replace(p, **changes)))
        if facts.splits_backward or check_rules(other.recipe, other.world_size):
            continue
        if (whole := simulate_step(other).bubble_share) < bubble:
            of_a_rank = f" with vpp = {vpp}" if vpp != p.vpp else ""
            yield f'hint: pp_schedule = "{name}"{of_a_rank} has whole backwards, and a bubble of {100 * whole:.3g} %'


def name_pairs(actions: Sequence[Action | Pair]) -> str:
    """How much of a rank's communication over ep is hidden, in words."""
    num_pairs = sum(isinstance(action, Pair) for action in actions)
    num_forwards = sum(action.kind == "forward" for action in flat(actions))
    return f"{num_pairs} of {num_forwards} forwards beside a backward"


def name_modules(stage: Sequence[str]) -> str:
    """The modules of a stage in words: `embedding, layers 0 to 11`."""
    layers = [name.removeprefix("layers.") for name in stage if name.startswith("layers.")]
    words = ["embedding"] if "embed" in stage else []
    if layers:
        words.append(f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}")
    return ", ".join([*words, *(["head"] if "head" in stage else [])]) or "nothing"
