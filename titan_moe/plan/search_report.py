"""The report of `titan-moe plan`: a table of the best layouts, why the first one wins and what limits it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_moe.config.parallel import ranks_of_a_node
from titan_moe.config.recipe import Recipe
from titan_moe.config.schema import in_toml
from titan_moe.plan.beyond import describe_beyond
from titan_moe.plan.choice.hardware import find_hardware
from titan_moe.plan.search import Found, Result
from titan_moe.plan.speed_report import parts_in_words

SHARES = {
    "sharding": "gathers and reductions",
    "rows": "rows between experts",
    "tp and cp": "messages of tp and cp",
    "idle": "the bubble",
}
"""Parts of a step in words."""
FIELDS = (
    "pp", "pp_schedule", "vpp", "pp_layout", "dp_replicate", "dp_shard", "cp", "cp_kind", "tp", "tp_comm_overlap", "ep",
    "etp", "dispatcher", "overlap", "expert_rank_capacity_factor", "ep_ranks_per_node", "accumulate_unsharded",
)  # fmt: skip
"""Of `[parallel]`, that a search sets."""


def as_rows(result: Result, world_size: int) -> list[dict[str, Any]]:
    """The layouts as data, the fastest first."""
    return [_row(found, world_size) for found in result.found]


def _row(found: Found, world_size: int) -> dict[str, Any]:
    prediction, train = found.prediction, found.recipe.train
    hours = prediction.seconds * train.steps / 3600
    return {
        "tokens_per_second_per_gpu": round(prediction.tokens_per_second),
        "mfu": round(prediction.mfu, 4),
        "step_ms": round(1e3 * prediction.seconds, 1),
        "peak_gib": round(found.peak_gib, 1),
        "exposed_messages": round(prediction.exposed_messages, 4),
        "bubble": round(prediction.bubble, 4),
        "hours": round(hours, 2),
        "gpu_hours": round(hours * world_size),
        "parts_ms": {name: round(1e3 * seconds, 2) for name, seconds in prediction.parts.items()},
        "recompute": list(found.entries),
        "overrides": changes_of(found.recipe),
    }


def changes_of(recipe: Recipe) -> dict[str, Any]:
    """The fields that a search sets, by key."""
    changes = {f"parallel.{name}": getattr(recipe.parallel, name) for name in FIELDS}
    changes["compile.cudagraph"] = recipe.compile.cudagraph
    changes["memory.recompute"] = list(recipe.memory.recompute)
    train = ("micro_batch_sequences", "global_batch_sequences")
    return changes | {f"train.{name}": getattr(recipe.train, name) for name in train}


def describe_plan(result: Result, recipe: Recipe, world_size: int, gpu: str) -> str:
    """The report."""
    tokens = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens
    head = f"{recipe.model.name} on {world_size:,} x {gpu}, {tokens:,} tokens a step, {recipe.train.steps:,} steps"
    tried = f"{result.num_candidates:,} candidates, {result.num_tried:,} of them checked"
    if not result.found and result.refusal:
        return f"{head}: all layouts break a rule ({tried}), such as: {result.refusal}"
    if not result.found:
        hardware, ranks = find_hardware(gpu), recipe.run.ranks_per_gpu
        room = f" {hardware.room('', ranks)}" if hardware else ""
        return f"{head}: no layout fits{room} ({tried}); --fit with a larger --nproc finds the fewest GPUs that hold it"
    columns = ("tokens/s/GPU", "MFU %", "GiB", "messages %", "bubble %", "hours", "GPU-hours", "layout")
    rows = [columns, *(_cells(found, world_size) for found in result.found)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(columns) - 1)]
    lines = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    rates = result.found[0].prediction.rates
    notes = [] if rates.is_measured else [f"{gpu} was not measured: rates by its data sheet"]
    if world_size > ranks_of_a_node(world_size) and not rates.node_link_is_measured:
        notes.append("messages between nodes were not measured: 42 GB/s of each GPU's adapter are assumed")
    notes = [*describe_beyond(result.found[0], world_size, gpu), *notes]
    return "\n".join([f"{head} ({tried})", *lines, *reasons(result.found), *notes])


def _cells(found: Found, world_size: int) -> tuple[str, ...]:
    row, prediction = _row(found, world_size), found.prediction
    return (
        f"{row['tokens_per_second_per_gpu']:,}",
        f"{100 * prediction.mfu:.1f}",
        f"{found.peak_gib:.1f}",
        f"{100 * prediction.exposed_messages:.1f}",
        f"{100 * prediction.bubble:.1f}",
        f"{row['hours']:,.1f}",
        f"{row['gpu_hours']:,}",
        layout_in_words(found),
    )


def layout_in_words(found: Found) -> str:
    """What differs between layouts: `pp 8 · ep 8 · 1f1b · symm_mem tile · 128 x 1 sequences`."""
    p = found.recipe.parallel
    sizes = [f"{name} {getattr(p, name)}" for name in ("pp", "tp", "cp", "ep", "etp") if getattr(p, name) > 1]
    sizes += [f"dp_replicate {p.dp_replicate}"] * (p.dp_replicate > 1)
    if p.pp > 1:
        sizes.append(p.pp_schedule + f" vpp {p.vpp}" * (p.vpp > 1))
    sizes.append(p.dispatcher + f" {p.overlap}" * (p.overlap != "none"))
    sizes.append(f"{found.candidate.num_microbatches} x {found.recipe.train.micro_batch_sequences} sequences")
    sizes += ["gathered once"] * p.accumulate_unsharded + ["launched"] * (found.recipe.compile.cudagraph == "off")
    sizes += [f"recompute {_short(found.entries)}"] * bool(found.entries)
    return " · ".join(sizes)


def _short(entries: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(entry.partition(":")[0] for entry in entries))


def reasons(found: Sequence[Found]) -> list[str]:
    """Why the first one wins, and what limits it."""
    first, limits = found[0], parts_in_words(found[0].prediction)
    lines = [f"limited by {limits}"]
    if len(found) > 1:
        lines.insert(0, f"wins over the second by {_gain(first, found[1])}")
    return lines


def _gain(first: Found, other: Found) -> str:
    """By how much, and the part of a token's time that differs most."""
    a, b = first.prediction, other.prediction
    gain = a.tokens_per_second / b.tokens_per_second - 1
    of_names = {*a.parts, *b.parts}
    saved = {name: (b.parts.get(name, 0.0) - a.parts.get(name, 0.0)) / a.seconds for name in of_names}
    name = max(sorted(saved), key=saved.__getitem__)
    return f"{100 * gain:.1f} %: most by {SHARES.get(name, name)}, {100 * saved[name]:.1f} % of a step less"


def written_recipe(path: str, found: Found, base: Path) -> str:
    """A recipe that bases on another one and sets the layout, as TOML."""
    comment = f"# by titan-moe plan {base.name}: predicted {found.prediction.tokens_per_second:,.0f} tokens/s a GPU"
    lines = [comment, f"base = {in_toml(path)}"]
    section = ""
    for key, value in sorted(changes_of(found.recipe).items()):
        name, _, field = key.partition(".")
        if name != section:
            section = name
            lines += ["", f"[{section}]"]
        lines.append(f"{field} = {in_toml(value)}")
    return "\n".join(lines) + "\n"
