"""What other GPUs would give the best layout of a search: twice as many, or those of the next generation."""

from collections.abc import Iterator
from dataclasses import replace

from titan_moe.config.recompute import with_entries
from titan_moe.config.rules import check_rules
from titan_moe.plan.choice.hardware import find_hardware
from titan_moe.plan.choice.kernels import as_run_on
from titan_moe.plan.cost.rates import rates_of
from titan_moe.plan.cost.step_time import Prediction, predict
from titan_moe.plan.resolved import Resolved
from titan_moe.plan.search import Found

NEXT = {"A100": "H100", "H100": "H200", "H200": "B200"}
"""By GPU, one that is faster or has more memory."""


def describe_beyond(found: Found, world_size: int, gpu: str) -> Iterator[str]:
    """The layout as it is, on more and on other GPUs, in words. A search on these finds the best for them."""
    now, p = found.prediction, found.recipe.parallel
    twice = found.recipe if p.dp_shard == -1 else replace(found.recipe, parallel=replace(p, dp_shard=2 * p.dp_shard))
    if not check_rules(twice, 2 * world_size):
        then = predict(_resolved(replace(found, recipe=twice), 2 * world_size, gpu), now.rates)
        yield f"the same layout on {2 * world_size:,} x {gpu}: {_in_words(then, now, 2)}"
    other = next((NEXT[name] for name in NEXT if find_hardware(name) == find_hardware(gpu)), None)
    if other and (rates := rates_of(other)):
        sheet = "" if rates.is_measured else ", by its data sheet"
        then = predict(_resolved(found, world_size, other), rates)
        yield f"the same layout on {world_size:,} x {other}{sheet}: {_in_words(then, now, 1)}"


def _resolved(found: Found, world_size: int, gpu: str) -> Resolved:
    recipe = with_entries(found.recipe, found.entries)
    return Resolved(as_run_on(recipe, world_size, find_hardware(gpu)), world_size)


def _in_words(then: Prediction, now: Prediction, times: int) -> str:
    faster = times * then.tokens_per_second / now.tokens_per_second
    return f"{then.tokens_per_second:,.0f} tokens/s of each GPU, a step {faster:.2f} times as fast"
