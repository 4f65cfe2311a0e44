"""Compare long runs: a Markdown table of what their records say, a row a run.

    titan-moe train recipes/qwen3_30b_a3b.toml --nproc 8 --run.folder=runs/forced --metrics.every_steps=1 \\
        --train.steps=30 --train.forced_load=balanced
    titan-moe train recipes/qwen3_30b_a3b.toml --nproc 8 --run.folder=runs/natural --metrics.every_steps=1 \\
        --train.steps=300
    python tools/table_of_runs.py runs/forced runs/natural --after 20

Speeds are of the steps after `--after`, whose median is compared with that of the first run. "Slowest 5 %" is the speed
below which a twentieth of them are. With `metrics.every_steps` above 1 a record's speed is a mean over these steps.
Steps that were taken again, and recordings of CUDA graphs: the number in the whole run; after the semicolon, the number
after `--after`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

COLUMNS = (
    "run",
    "steps",
    "tokens/s/GPU",
    "of the first",
    "TF",
    "slowest 5 % below",
    "steps below 90 %",
    "peak GiB",
    "capacity factor",
    "largest need",
    "taken again; late",
    "recordings; late",
    "busiest expert; rank",
    "loss at step",
)
NOTHING = "–"
SHOWN_LOSSES = (20, 40, 60, 100, 200, 300, 500, 1000)

Record = dict[str, Any]


def main(argv: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or their metrics.jsonl")
    parser.add_argument("--after", type=int, default=20, help="speeds and loads are of the steps after this one")
    args = parser.parse_args(argv)
    rows = []
    for run in args.runs:
        try:
            folder = run.resolve() if run.is_dir() else run.resolve().parent
            rows.append(row_of(folder.name, read(run), args.after))
        except (OSError, ValueError) as error:
            parser.error(f"{run}: {error}")
    first = rows[0]["tokens/s/GPU"]
    for row in rows:
        row["of the first"] = f"{row['tokens/s/GPU'] / first:.3f}"
        row["tokens/s/GPU"] = f"{row['tokens/s/GPU']:,.0f}"
    cells = [COLUMNS, ["---"] * len(COLUMNS), *([row[column] for column in COLUMNS] for row in rows)]
    lines = [f"| {' | '.join(line)} |" for line in cells]
    print("\n".join(lines))
    return lines


def read(run: Path) -> list[Record]:
    """The records of a run's training steps.

    Raises: ValueError if it has none.
    """
    file = run / "metrics.jsonl" if run.is_dir() else run
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "loss" in record]
    if not steps:
        raise ValueError("no training step has been logged")
    return steps


def row_of(name: str, records: list[Record], after: int) -> dict[str, Any]:
    """The columns of a run.

    Raises: ValueError if it has no step after `after`.
    """
    late = [record for record in records if record["step"] > after]
    if not late:
        raise ValueError(f"no record after step {after}; its last is that of step {records[-1]['step']}")
    speeds = sorted(record["tokens_per_second_per_gpu"] for record in late)
    median = statistics.median(speeds)
    slow = [record["step"] for record in late if record["tokens_per_second_per_gpu"] < 0.9 * median]
    last = records[-1]["step"]
    losses = [record for record in records if record["step"] in (*SHOWN_LOSSES, last)]
    return {
        "run": name,
        "steps": str(last),
        "tokens/s/GPU": median,
        "TF": f"{statistics.median(record['tflops_per_gpu'] for record in late):.0f}",
        "slowest 5 % below": f"{speeds[len(speeds) // 20]:,.0f}",
        "steps below 90 %": _listed(slow),
        "peak GiB": f"{records[-1]['memory_gib']:.1f}",
        "capacity factor": _changes(records, "capacity", "factor"),
        "largest need": _largest(late, "capacity", "needed"),
        "taken again; late": _counts(records, after, "rerun_steps"),
        "recordings; late": _counts(records, after, "graph_recordings"),
        "busiest expert; rank": f"{_largest(late, 'expert_load')}; {_largest(late, 'overload', 'max')}",
        "loss at step": ", ".join(f"{record['step']}: {_number(record['loss'], '.3f')}" for record in losses),
    }


def _listed(steps: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, steps[:most])) or NOTHING
    return shown if len(steps) <= most else f"{shown} and {len(steps) - most} more"


def _number(value: float | None, form: str) -> str:
    """A number that a record has; it has null for infinite ones and for those that are none."""
    return NOTHING if value is None else format(value, form)


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


def _counts(records: list[Record], after: int, field: str) -> str:
    """A count: over the whole run, and of the steps after `after`. It begins anew in each process of a resumed run."""
    early = total = before = 0
    counted = [record for record in records if field in record]
    for record in counted:
        count = record[field]
        total += count - before if count >= before else count
        before = count
        if record["step"] <= after:
            early = total
    return f"{total}; {total - early}" if counted else NOTHING


if __name__ == "__main__":
    main(sys.argv[1:])
