"""The replica slots of a rank, and what `parallel.expert_clones = "auto"` means.

With replica slots in use, every exchange decides on the device how many clones it has. A balanced exchange has none. It
moves no weights then, but still costs six barriers and some twenty small launches in forward and backward. So "auto"
uses its replica slots only while ranks are imbalanced (training/clone_control.py); here is whether it has any.
"""

from collections.abc import Iterator
from dataclasses import replace

from titan_moe.config.gemms import has_native_experts
from titan_moe.config.parallel import resolve
from titan_moe.config.recipe import Recipe, expert_hidden_size, expert_slots
from titan_moe.config.recompute import recompute_of

COST_SLOTS = 700
"""Expert slots that a rank computes in the time in which an expert is fetched and its gradient returned. It was
measured with the experts of Mixtral (bf16, NVLink; tools/results/clones.md); bytes and operations of an expert grow
alike."""
MIN_SLOTS = 5_000
"""Slots of a rank from which clones may pay, an estimate: of fewer, a clone costs more than a seventh."""
MIN_TFLOP = 1.4
"""Operations of a rank's experts for a microbatch in a layer from which clones may pay, an estimate: barriers and
launches take 0.5 to 0.9 ms of an exchange, with clones or without."""
RATE_IN_FP8 = 2
"""Operations of experts in fp8 in the time of one in bf16: the costs above are as many times more of these."""
PAYS_FROM = 1.1
"""Load of the busiest rank over the mean from which clones save more than they take (tools/results/clones.md)."""


def num_clones(recipe: Recipe) -> int:
    """Return the number of replica slots of a rank, in use or not; "auto" must be resolved first."""
    return recipe.parallel.num_clones(recipe.model.moe.num_experts)


def clones_pay_from(recipe: Recipe) -> float:
    """Return the load of the busiest rank over the mean from which "auto" uses its replica slots."""
    return PAYS_FROM + cost_slots(recipe) / expert_slots(recipe)


def cost_slots(recipe: Recipe) -> int:
    """Return the slots that a clone costs."""
    return COST_SLOTS * _rate(recipe)


def _rate(recipe: Recipe) -> int:
    return RATE_IN_FP8 if has_native_experts(recipe) else 1


def _tflop_of_a_rank(recipe: Recipe) -> float:
    """Operations of a rank's experts for a microbatch in a layer, forward and backward."""
    weights = 3 * recipe.model.expert_width * expert_hidden_size(recipe)
    return 6 * weights * expert_slots(recipe) / 1e12


def why_no_clones(recipe: Recipe, world_size: int) -> str:
    """The first reason why "auto" means "off"; empty if it has replica slots."""
    return next(_reasons(recipe, world_size), "")


def _reasons(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.ep == 1 or not recipe.model.num_moe_layers:
        yield "no experts are on other ranks"
    if not p.facts.shares_memory_of_ep:
        yield f'dispatcher = "{p.dispatcher}" would send the weights of clones by collectives'
    min_slots, min_tflop = MIN_SLOTS * _rate(recipe), MIN_TFLOP * _rate(recipe)
    if (num_slots := expert_slots(recipe)) < min_slots:
        yield f"a microbatch has {num_slots:,} expert slots a rank, and clones may pay from {min_slots:,} on"
    if (tflop := _tflop_of_a_rank(recipe)) < min_tflop:
        yield (
            f"a rank's experts compute {tflop:.2g} TFLOP for a microbatch in a layer, and clones may pay from "
            f"{min_tflop:g} on"
        )
    # a GEMM takes own weights and clones as one tensor: without room behind a copy of own weights, it copies them again
    if not resolve(p, world_size).experts_are_unsharded(recipe.precision):
        yield "experts are sharded, so GEMMs would need a copy of a rank's own weights"
    if recipe.precision.compute == recipe.precision.parameters:
        yield "parameters are in precision.compute, so GEMMs would need a copy of a rank's own weights"
    if p.pp > 1 or p.overlap == "microbatch":
        yield "microbatches in flight share the copies of a rank's own weights, and have different clones"
    if not {"block", "expert_weights"}.isdisjoint(recompute_of(recipe).layers):
        yield "recomputation would fetch the weights of clones again"
    if not (p.has_auto_capacity or p.fixed_capacity_factor):
        yield "without a capacity bound the host reads nothing after a step, so it would not see the imbalance"


def resolve_clones(recipe: Recipe, world_size: int) -> Recipe:
    """Replace "auto" by "off" where it has no replica slots."""
    is_off = recipe.parallel.has_clones and why_no_clones(recipe, world_size)
    return replace(recipe, parallel=replace(recipe.parallel, expert_clones="off")) if is_off else recipe
