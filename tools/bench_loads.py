"""Time MoE layers under uneven loads: the arena, whose size follows the load, beside exact sizes read on the host.

    python tools/bench_loads.py --nproc 8 [--shape qwen3] [--layers 4] [--steps 20] [--loads bursts drifting]

Loads are those of titan_moe/config/forced_loads.py, after Megatron-LM's W0 to W7 (pull request 7488). A step is forward
and backward of the layers: dispatch, fused experts, combine. Candidates are `arena`, `arena_tile` (with overlap of
tiles) and `alltoall` with exact sizes; `allgather` bounds each layer. Times are of timed steps alone, the slowest rank
of each. Steps taken again are part of them: one counts as one step, and its time is that of both. `need` is the largest
capacity factor that a timed step needed, `factor` that of the step after the last one, 0 for no bound. All loads and
candidates run in the same processes (tools/time_loads.py). A job that fails or hangs is reported; the next ones run in
new processes.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dispatch_candidates import Case
from rank_processes import run_jobs
from time_loads import CANDIDATES, EXACT

from titan_moe.config.forced_loads import DRAWN_LOADS

WORKER = Path(__file__).with_name("time_loads.py")
TOKENS = 8192
SHAPES = {
    "qwen3": Case(TOKENS, width=2048, hidden=768, experts=128, choices=8),
    "v2_lite": Case(TOKENS, width=2048, hidden=1408, experts=64, choices=6),
    "mixtral": Case(TOKENS, width=4096, hidden=14_336, experts=8, choices=2),
}
SMOKE = Case(tokens=256, width=16, hidden=8, experts=8, choices=2, kernels="grouped_mm")
COLUMNS = (
    ("load", "load"),
    ("candidate", "candidate"),
    ("mean ms", "mean_ms"),
    ("median ms", "median_ms"),
    ("worst ms", "worst_ms"),
    (f"x {EXACT}", "ratio"),
    ("taken again", "num_reruns"),
    ("need", "need"),
    ("factor", "factor"),
    ("arena GiB", "arena_gib"),
    ("peak GiB", "peak_gib"),
)
"""Heading and key of a result."""
Results = dict[str, dict[str, Any]]
"""By `load:candidate`."""


def main() -> None:
    args = parse()
    case = SMOKE if args.smoke else SHAPES[args.shape]
    case = replace(case, tokens=args.tokens or case.tokens)
    results: Results = {}
    for job, result in run(case, args):
        results[job] = result
        print(f"{job}: {'failed' if 'error' in result else 'done'}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1))
    print("\n".join(["", *describe(results, case, args.nproc, args.layers, args.steps)]))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=8, help="GPUs")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3")
    parser.add_argument("--tokens", type=int, help=f"per GPU; default {TOKENS:,}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--loads", nargs="+", choices=DRAWN_LOADS, default=list(DRAWN_LOADS))
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, help="default: alltoall arena arena_tile")
    parser.add_argument("--timeout", type=float, default=300, help="seconds per load of a candidate, and per launch")
    parser.add_argument("--out", type=Path, help="JSON file for all results")
    parser.add_argument("--smoke", action="store_true", help="a tiny case on the CPU, as a test of the script")
    args = parser.parse_args(words)
    args.candidates = args.candidates or [EXACT, *(["allgather"] if args.smoke else ["arena", "arena_tile"])]
    return args


def run(case: Case, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run all jobs. Yields (load:candidate, result)."""
    command = [
        str(WORKER),
        f"--case={json.dumps(asdict(case))}",
        f"--layers={args.layers}",
        f"--steps={args.steps}",
        f"--device={'cpu' if args.smoke else 'cuda'}",
    ]
    jobs = [f"{load}:{name}" for load in dict.fromkeys(args.loads) for name in dict.fromkeys(args.candidates)]
    yield from run_jobs(command, jobs, args.nproc, args.timeout)


def describe(results: Results, case: Case, num_ranks: int, num_layers: int, num_steps: int) -> Iterator[str]:
    """A heading with the case, and a table in Markdown."""
    facts = next((result for result in results.values() if "device" in result), {})
    yield (
        f"{num_ranks} x {facts.get('device', 'an unknown device')}, torch {facts.get('torch', 'unknown')}; "
        f"{num_layers} layers, {num_steps} steps, {case.tokens:,} tokens per GPU, d {case.width}, "
        f"{case.choices} of {case.experts} experts of {case.hidden}, kernels {case.kernels}"
    )
    yield ""
    yield f"| {' | '.join(heading for heading, _ in COLUMNS)} |"
    yield "|" + "---|" * len(COLUMNS)
    for job, result in results.items():
        load, candidate = job.split(":")
        if "error" in result:
            yield f"| {load} | {candidate} | failed: {result['error'].replace('|', '/')} |" + " |" * (len(COLUMNS) - 3)
            continue
        exact = results.get(f"{load}:{EXACT}", {}).get("mean_ms")
        cells = result | {"load": load, "candidate": candidate, "ratio": exact / result["mean_ms"] if exact else "–"}
        if candidate == EXACT:
            cells |= dict.fromkeys(("num_reruns", "need", "factor", "arena_gib"), "–")
        yield f"| {' | '.join(_cell(cells[key]) for _, key in COLUMNS)} |"


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
