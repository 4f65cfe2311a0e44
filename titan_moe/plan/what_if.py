"""What a layout would be with one thing changed: speed, memory, and the parts of a step that change.

Each change is one field, or one number of GPUs or card. What the change alone breaks is mended where a field follows
from it: the dispatcher that an ep group over nodes needs, a step that cannot be recorded, a schedule for stages.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from titan_moe.config.changes import Change, Way, listed, with_changes
from titan_moe.config.dispatchers import DISPATCHERS
from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import AUTO, with_entries
from titan_moe.config.rules import check_rules
from titan_moe.config.schema import value_of
from titan_moe.plan.beyond import NEXT
from titan_moe.plan.choice.hardware import find_hardware
from titan_moe.plan.choice.kernels import as_run_on
from titan_moe.plan.choice.peaks import GROWN_FACTOR
from titan_moe.plan.choice.recompute import choose_recompute
from titan_moe.plan.cost.rates import rates_of
from titan_moe.plan.cost.step_time import Prediction, predict
from titan_moe.plan.resolved import Resolved

LEAST = 0.01
"""Of a token's time: parts that change by less are not named."""
MOST_PARTS = 3
"""That are named."""
NUMBERS = (
    *(("parallel.tp", factor) for factor in (2.0, 0.5)),
    *(("parallel.ep", factor) for factor in (2.0, 0.5)),
    *(("parallel.pp", factor) for factor in (2.0, 0.5)),
    ("parallel.vpp", 2.0),
    ("parallel.cp", 2.0),
    *(("train.micro_batch_sequences", factor) for factor in (2.0, 0.5)),
    ("train.global_batch_sequences", 2.0),
)
"""Fields that are doubled or halved."""
VALUES: Mapping[str, tuple[Any, ...]] = {
    "memory.recompute": (("none",), ("block",)),
    "precision.format": ("compute", "fp8_rowwise"),
    "precision.moments": ("bf16", "fp32"),
    "compile.cudagraph": ("off", "step"),
    "parallel.overlap": ("none", "tile", "microbatch"),
    "parallel.dispatcher": tuple(name for name, facts in DISPATCHERS.items() if facts.moves_rows),
    "parallel.accumulate_unsharded": (True, False),
}
"""Fields that take each of some values."""


@dataclass(frozen=True)
class Case:
    """A layout with one thing changed."""

    name: str
    recipe: Recipe
    num_ranks: int
    gpu: str
    refusal: str = ""
    """The rule that the change breaks, or ""; then nothing is predicted."""
    prediction: Prediction | None = None
    peak_gib: float = 0.0
    limit_gib: float = 0.0
    recomputed: float = 0.0
    """Of a step that does not fit: tokens/s of a GPU if "auto" chooses what is computed again; 0 if that does not fit
    either."""

    @property
    def fits(self) -> bool:
        """Whether the peak of a step fits the memory."""
        return not self.refusal and self.peak_gib <= self.limit_gib


def what_if(base: Recipe, num_ranks: int, gpu: str) -> list[Case]:
    """The base, and one case for each change. The base computes again what its recipe says; "auto" is chosen first."""
    if AUTO in base.memory.recompute:
        hardware = find_hardware(gpu)
        assert hardware is not None, "a known GPU"
        choice = choose_recompute(as_run_on(base, num_ranks, hardware), num_ranks, hardware)
        base = with_entries(base, choice.entries)
    cases = [_case("as it is", base, num_ranks, gpu)]
    cases += [_changed(base, way, num_ranks, gpu) for way in _ways(base)]
    cases.append(_changed(base, (), 2 * num_ranks, gpu, f"{2 * num_ranks:,} GPUs"))
    own = find_hardware(gpu)
    cards = dict.fromkeys(name for pair in NEXT.items() for name in pair if find_hardware(name) != own)
    return cases + [_case(f"on {card}", base, num_ranks, card) for card in cards]


def _ways(base: Recipe) -> Iterator[Way]:
    for key, factor in NUMBERS:
        value = value_of(base, key)
        if float(value * factor).is_integer():
            yield (Change(key, int(value * factor), 1.0),)
    if base.train.micro_batch_sequences % 2 == 0 or base.train.global_batch_sequences % 2 == 0:
        yield _twice_as_long(base)
    for key, values in VALUES.items():
        if key == "parallel.dispatcher" and base.parallel.ep == 1:
            continue
        now = value_of(base, key)
        now = ("none",) if now == () else now  # of what is computed again
        yield from ((Change(key, value, 1.0),) for value in values if value != now)


def _twice_as_long(base: Recipe) -> Way:
    """Sequences of twice as many tokens, as many tokens a step."""
    changes = [Change("train.seq_len_tokens", 2 * base.train.seq_len_tokens, 1.0)]
    changes.append(Change("train.global_batch_sequences", max(base.train.global_batch_sequences // 2, 1), 1.0))
    if base.train.micro_batch_sequences % 2 == 0:
        changes.append(Change("train.micro_batch_sequences", base.train.micro_batch_sequences // 2, 1.0))
    return tuple(changes)


def _changed(base: Recipe, way: Way, num_ranks: int, gpu: str, name: str = "") -> Case:
    """A change, with the fields that follow from it if it breaks a rule alone."""
    refusal, keys = "", {change.key for change in way}
    for more in ((), *_following(base, way)):
        if keys & {change.key for change in more}:  # which would take the change back
            continue
        recipe = with_changes(base, (*_freed(base, way), *way, *more))
        if not (breaches := check_rules(recipe, num_ranks)):
            words = name or listed(way)
            return _case(f"{words}, with {listed(more)}" if more else words, recipe, num_ranks, gpu)
        refusal = breaches[0]
    return Case(name or listed(way), base, num_ranks, gpu, refusal)


def _freed(base: Recipe, way: Way) -> Way:
    """What a mesh derives, and what belongs to a number of stages or ranks."""
    keys = {change.key for change in way}
    freed = [Change("parallel.dp_shard", -1, 0.0)]
    if keys & {"parallel.pp", "parallel.vpp"} and base.parallel.pp_layout:
        freed.append(Change("parallel.pp_layout", "", 0.0))
    return tuple(freed)


def _following(base: Recipe, way: Way) -> Iterator[Way]:
    """Fields that may have to follow a change, fewest first."""
    off = Change("compile.cudagraph", "off", 0.0)
    yield (off,)
    keys = {change.key for change in way}
    if "parallel.vpp" in keys:
        yield (Change("parallel.pp_schedule", "interleaved_1f1b", 0.0),)
    if "parallel.pp" in keys:
        ep = (Change("parallel.ep", base.parallel.ep // 2, 0.0),) if base.parallel.ep % 4 == 0 else ()
        for schedule, vpp in ((base.parallel.pp_schedule, base.parallel.vpp), ("1f1b", 1), ("interleaved_1f1b", 2)):
            of_stages = Change("parallel.pp_schedule", schedule, 0.0), Change("parallel.vpp", vpp, 0.0)
            is_same = (schedule, vpp) == (base.parallel.pp_schedule, base.parallel.vpp)
            yield from ([] if is_same else [of_stages])
            yield from ([(*(() if is_same else of_stages), *ep)] if ep else [])
    bounded = Change("parallel.expert_rank_capacity_factor", "auto", 0.0)
    if "parallel.ep" in keys:
        value = next(change.value for change in way if change.key == "parallel.ep")
        names = ["local"] if value == 1 else ["symm_mem", "hierarchical_symm_mem"]
        for name in names:
            for overlap in dict.fromkeys((base.parallel.overlap, *DISPATCHERS[name].overlaps, "none")):
                more = Change("parallel.dispatcher", name, 0.0), Change("parallel.overlap", overlap, 0.0)
                yield from (more, (*more, bounded))
    if "parallel.dispatcher" in keys:
        none = Change("parallel.overlap", "none", 0.0)
        yield from ((none,), (none, bounded), (none, off), (none, bounded, off))


def _case(name: str, recipe: Recipe, num_ranks: int, gpu: str) -> Case:
    rates, hardware = rates_of(gpu), find_hardware(gpu)
    assert rates is not None
    assert hardware is not None
    limit = hardware.free_gib(recipe.run.ranks_per_gpu)
    prediction, gib = _predicted(recipe, num_ranks, gpu)
    recomputed = 0.0
    if gib > limit:
        choice = choose_recompute(as_run_on(with_entries(recipe, ()), num_ranks, hardware), num_ranks, hardware)
        other, of_other = _predicted(with_entries(recipe, choice.entries), num_ranks, gpu)
        recomputed = other.tokens_per_second if of_other <= limit else 0.0
    return Case(name, recipe, num_ranks, gpu, "", prediction, gib, limit, recomputed)


def _predicted(recipe: Recipe, num_ranks: int, gpu: str) -> tuple[Prediction, float]:
    """A step, and the GiB of its peak."""
    resolved, rates = Resolved(as_run_on(recipe, num_ranks, find_hardware(gpu)), num_ranks), rates_of(gpu)
    assert rates is not None
    factor = resolved.recipe.parallel.fixed_capacity_factor or GROWN_FACTOR
    return predict(resolved, rates), (resolved.peak_bytes(factor) + resolved.outside_bytes) / 2**30


def parts_of_a_token(case: Case) -> dict[str, float]:
    """Seconds of a GPU's token by part."""
    assert case.prediction is not None
    tokens = case.prediction.seconds * case.prediction.tokens_per_second
    return {name: seconds / tokens for name, seconds in case.prediction.parts.items()}


def changed_parts(case: Case, base: Case) -> list[tuple[str, float]]:
    """The parts that change most, each by so much of the time of a token of the base."""
    then, now = parts_of_a_token(case), parts_of_a_token(base)
    changes = {name: (then.get(name, 0.0) - now.get(name, 0.0)) / sum(now.values()) for name in {**then, **now}}
    order = sorted(changes.items(), key=lambda part: (-abs(part[1]), part[0]))
    return [(name, change) for name, change in order if abs(change) >= LEAST][:MOST_PARTS]


def as_rows(cases: list[Case]) -> list[dict[str, Any]]:
    """The cases as data, the base first."""
    base = cases[0]
    return [_row(case, base) for case in cases]


def _row(case: Case, base: Case) -> dict[str, Any]:
    row: dict[str, Any] = {"change": case.name, "num_ranks": case.num_ranks, "gpu": case.gpu, "fits": case.fits}
    if case.refusal or case.prediction is None:
        return row | {"refusal": case.refusal}
    found, of_base = case.prediction, base.prediction
    assert of_base is not None
    return row | {
        "tokens_per_second_per_gpu": round(found.tokens_per_second),
        "gain": round(found.tokens_per_second / of_base.tokens_per_second - 1, 4),
        "mfu": round(found.mfu, 4),
        "peak_gib": round(case.peak_gib, 1),
        "limit_gib": round(case.limit_gib, 1),
        "exposed_messages": round(found.exposed_messages, 4),
        "bubble": round(found.bubble, 4),
        "with_auto_recompute": round(case.recomputed) or None,
        "by_data_sheet": not found.rates.is_measured,
        "changed_parts": {name: round(change, 4) for name, change in changed_parts(case, base)},
    }


def describe_what_if(cases: list[Case]) -> str:
    """A table: those that fit first by speed, then those that do not, then those that rules refuse."""
    columns = ("tokens/s/GPU", "gain %", "GiB", "messages %", "bubble %", "change")
    base, others = cases[0], sorted(cases[1:], key=_order)
    rows = [columns, *(_cells(case, base) for case in (base, *others) if case.prediction is not None)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(columns) - 1)]
    lines = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    lines += [f"refused: {case.name}: {case.refusal}" for case in others if case.refusal]
    return "\n".join(lines)


def _order(case: Case) -> tuple[bool, bool, float]:
    return case.prediction is None, not case.fits, -(case.prediction.tokens_per_second if case.prediction else 0.0)


def _cells(case: Case, base: Case) -> tuple[str, ...]:
    found, of_base = case.prediction, base.prediction
    assert found is not None
    assert of_base is not None
    words = case.name + ("" if found.rates.is_measured else " (by its data sheet)")
    if changed := changed_parts(case, base):
        words += ": " + ", ".join(f"{name} {100 * change:+.0f} %" for name, change in changed)
    if not case.fits:
        words += f"; does NOT fit {case.limit_gib:.0f} GiB"
        words += f", but with memory.recompute = auto: {case.recomputed:,.0f} tokens/s" if case.recomputed else ""
    return (
        f"{found.tokens_per_second:,.0f}",
        f"{100 * (found.tokens_per_second / of_base.tokens_per_second - 1):+.1f}",
        f"{case.peak_gib:.1f}",
        f"{100 * found.exposed_messages:.1f}",
        f"{100 * found.bubble:.1f}",
        words,
    )
