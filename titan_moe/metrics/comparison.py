"""Compare runs by their records and recipes: a table in Markdown, a row for each quantity, a column for each run.

Speeds, loads and needs are medians or largest values of the steps after `after`: the first ones compile, and find sizes
that fit. "Slowest 5 % below" is the speed below which a twentieth of them are. With `metrics.every_steps` above 1 a
record's speed is a mean over these steps. Steps that were taken again, and recordings of CUDA graphs: the number in the
whole run; after the semicolon, that after `after`. Does not import torch.
"""

import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from titan_moe.config import RecipeError
from titan_moe.config.schema import in_toml
from titan_moe.metrics.run_records import Record, RunRecords

NOTHING = "–"
SHOWN_LOSSES = (20, 40, 60, 100, 200, 300, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
AFTER = 20
"""Steps that speeds are not of; of a shorter run its first half."""
OF_EACH_RUN = ("run.folder", "metrics.wandb_name")
"""Fields in which runs differ anyway."""
SETS = "validation_loss/"

Column = dict[str, str]


def compare(runs: Sequence[RunRecords], after: int | None = None) -> list[list[str]]:
    """The rows of the table, the first of them its heading. What no run has is left out.

    Raises: RecipeError that names runs without a step after `after`, if it is given.
    """
    if after is not None and (short := [run.name for run in runs if run.steps and run.steps[-1]["step"] <= after]):
        raise RecipeError([f"{name} has no record after step {after}; --after sets an earlier one" for name in short])
    columns = [_column(run, after) for run in runs]
    speeds = [_median(late_steps(run, after), "tokens_per_second_per_gpu") for run in runs]
    if len(runs) > 1 and speeds[0]:
        for column, speed in zip(columns, speeds, strict=True):
            column["of the first"] = _number(speed and speed / speeds[0], ".3f")
    for column, differing in zip(columns, _differing([run.fields for run in runs]), strict=True):
        column |= differing
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, NOTHING) for column in columns)] for name in _in_order(names)]
    return [["", *(run.name for run in runs)], *(row for row in rows if set(row[1:]) != {NOTHING})]


def in_markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines.insert(1, ["-" * max(width, 3) for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def late_steps(run: RunRecords, after: int | None) -> list[Record]:
    """The records of steps after `after`; None: after `AFTER`, or the first half of a shorter run."""
    if not run.steps:
        return []
    first = min(AFTER, run.steps[-1]["step"] // 2) if after is None else after
    return [record for record in run.steps if record["step"] > first]


def _column(run: RunRecords, after: int | None) -> Column:
    """What the records of a run say, by quantity."""
    steps, late = run.steps, late_steps(run, after)
    if not steps:
        return {"steps": "none logged"} | _losses(run)
    last, first_late = steps[-1], late[0]["step"] if late else 0
    speed_of = {record["step"]: speed for record in late if (speed := record.get("tokens_per_second_per_gpu"))}
    speeds, median = sorted(speed_of.values()), _median(late, "tokens_per_second_per_gpu")
    slow = [step for step, speed in speed_of.items() if median and speed < 0.9 * median]
    num_steps = run.fields.get("train.steps", last["step"])
    lr = [record["lr"] for record in steps if record.get("lr") is not None]
    return {
        "steps": f"{last['step']}" if num_steps == last["step"] else f"{last['step']} of {num_steps}",
        "tokens": _number(last.get("tokens_seen"), ",d"),
        "epochs": _number(last.get("epoch"), ".3g"),
        **_losses(run),
        "learning rate, largest; last": f"{max(lr):.3g}; {lr[-1]:.3g}" if lr else NOTHING,
        "tokens/s/GPU": _number(median, ",.0f"),
        "of the first": NOTHING,
        "TFLOP/s": _number(_median(late, "tflops_per_gpu"), ".3g"),
        "MFU": _number(_median(late, "mfu"), ".1%"),
        "slowest 5 % below": _number(speeds[len(speeds) // 20] if speeds else None, ",.0f"),
        "steps below 90 %": _listed(slow),
        "peak GiB": _number(max(record.get("memory_gib") or 0.0 for record in steps) or None, ".1f"),
        "capacity factor": _changes(steps, "capacity", "factor"),
        "largest need": _largest(late, "capacity", "needed"),
        "taken again; late": _counts(steps, first_late, "rerun_steps"),
        "recordings; late": _counts(steps, first_late, "graph_recordings"),
        "skipped steps": _counts(steps, first_late, "skipped_steps"),
        "busiest expert": _largest(late, "expert_load"),
        "busiest rank": _largest(late, "overload", "max"),
    }


def _losses(run: RunRecords) -> Column:
    """The last losses, those at some steps, and those of validations, each with the lowest if it is an earlier one."""
    logged = {record["step"]: record["loss"] for record in run.steps}
    losses = {step: "not finite" if loss is None else f"{loss:.4f}" for step, loss in logged.items()}
    column = {"loss": losses[run.steps[-1]["step"]]} if losses else {}
    column |= {f"loss at step {step}": losses[step] for step in SHOWN_LOSSES if step in losses}
    for name in dict.fromkeys(name for record in run.validations for name in record if name.startswith(SETS[:-1])):
        found = [(record[name], record["step"]) for record in run.validations if record.get(name) is not None]
        if found:
            words, (lowest, step) = f"{found[-1][0]:.4f}", min(found)
            words += f"; {lowest:.4f} at {step}" if lowest < found[-1][0] else ""
            column[name.replace("_", " ").replace("/", " ", 1)] = words
    return column


def _differing(recipes: Sequence[Mapping[str, Any]]) -> list[Column]:
    """For each run the fields that not all recipes have alike. Runs without a recipe are not compared."""
    known = [fields for fields in recipes if fields]
    keys = dict.fromkeys(key for fields in known for key in fields if key not in OF_EACH_RUN)
    texts = [{key: in_toml(fields[key]) if key in fields else NOTHING for key in keys} for fields in recipes]
    of_known = [text for text, fields in zip(texts, recipes, strict=True) if fields]
    return [{key: text[key] for key in keys if len({other[key] for other in of_known}) > 1} for text in texts]


def _in_order(names: Sequence[str]) -> list[str]:
    """Losses at steps after the last loss by their step, validations after them; all else as it comes."""
    places = {name: place for place, name in enumerate(names)}
    if "loss" not in places:
        return list(names)

    def place(name: str) -> tuple[int, int, int]:
        if name.startswith("loss at step "):
            return places["loss"], 1, int(name.rpartition(" ")[2])
        return (places["loss"], 2, places[name]) if name.startswith("validation loss") else (places[name], 0, 0)

    return sorted(names, key=place)


def _listed(steps: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, steps[:most])) or NOTHING
    return shown if len(steps) <= most else f"{shown} and {len(steps) - most} more"


def _number(value: float | None, form: str) -> str:
    """A number that a record has; it has null for infinite ones and for those that are none."""
    return NOTHING if value is None else format(value, form)


def _median(records: Sequence[Record], field: str) -> float | None:
    values = [record[field] for record in records if record.get(field) is not None]
    return statistics.median(values) if values else None


def _largest(records: list[Record], field: str, key: str = "") -> str:
    """The largest value of a field, of all its keys or of one."""
    found = [record[field] for record in records if field in record]
    values = [value for table in found for name, value in table.items() if not key or name == key]
    return _number(max((value for value in values if value is not None), default=None), ".2f")


def _changes(records: list[Record], field: str, key: str) -> str:
    """The values of a field of the next step, each with the first step that has it."""
    values = [(record["step"] + 1, record[field][key]) for record in records if field in record]
    new = [next(group) for _, group in groupby(values, key=itemgetter(1))]
    return ", ".join(f"{_number(value, 'g')} (step {step})" for step, value in new) or NOTHING


def _counts(records: list[Record], first_late: int, field: str) -> str:
    """A count: over the whole run, and of the steps from `first_late` on; nothing if it stays 0. It begins anew in each
    process of a resumed run."""
    early = total = before = 0
    for record in (record for record in records if field in record):
        count = record[field]
        total += count - before if count >= before else count
        before = count
        if record["step"] < first_late:
            early = total
    return f"{total}; {total - early}" if total else NOTHING
