"""The rows of `titan-moe check` about the speed of a step."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from titan_moe.config.model import ModelConfig
from titan_moe.config.rules import check_rules
from titan_moe.plan.cost.memory import gathered_bytes
from titan_moe.plan.cost.rates import rates_of
from titan_moe.plan.cost.roofline import sharding_bytes
from titan_moe.plan.cost.step_time import Prediction, predict
from titan_moe.plan.resolved import Resolved

MOST_PARTS = 7
"""That a row names; the others are summed."""


def describe_speed(resolved: Resolved, devices: Iterable[str]) -> Iterator[str]:
    """The predicted speed on each device, and its parts; nothing on CPUs or for a model that is not counted here."""
    recipe = resolved.recipe
    if recipe.run.device == "cpu" or not resolved.num_microbatches:
        return
    if recipe.model.class_ != ModelConfig.class_ and not recipe.model.table:
        return
    for device in devices:
        if (rates := rates_of(device)) is None:
            continue
        found = predict(resolved, rates)
        sheet = "" if rates.is_measured else ", by its data sheet"
        yield (
            f"about {found.tokens_per_second:,.0f} tokens/s of each {device}{sheet}, MFU {100 * found.mfu:.1f} %, "
            f"{1e3 * found.seconds:,.0f} ms a step: {parts_in_words(found)}"
        )


def parts_in_words(found: Prediction) -> str:
    """The largest parts of a step, in percent: `experts 35 %, attention 18 %`."""
    parts = sorted(found.parts.items(), key=lambda part: -part[1])
    words = [f"{name} {100 * seconds / found.seconds:.0f} %" for name, seconds in parts[:MOST_PARTS]]
    if others := sum(seconds for _, seconds in parts[MOST_PARTS:]):
        words.append(f"others {100 * others / found.seconds:.0f} %")
    return ", ".join(words)


def describe_accumulation(resolved: Resolved) -> Iterator[str]:
    """What a pipeline would save, and what it would take, if it gathered parameters once a step."""
    recipe, p = resolved.recipe, resolved.recipe.parallel
    once = replace(resolved, recipe=replace(recipe, parallel=replace(p, accumulate_unsharded=True)))
    if p.pp == 1 or p.accumulate_unsharded or check_rules(once.recipe, once.world_size):
        return
    pairs = list(zip(resolved.parts, once.parts, strict=True))
    saved = max(sharding_bytes(now) - sharding_bytes(then) for now, then in pairs) / 2**30
    added = max(gathered_bytes(then) - gathered_bytes(now) for now, then in pairs) / 2**30
    if saved > 0:
        yield (
            f"hint: parameters are gathered and gradients reduced in each of {resolved.num_microbatches} "
            f"microbatches; parallel.accumulate_unsharded = true sends up to {saved:,.3g} GiB less a rank and step, "
            f"and holds up to {added:.3g} GiB more of unsharded parameters and gradients"
        )
