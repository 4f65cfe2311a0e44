"""Time dispatch and combine, alone and in a MoE layer, of every dispatcher and of torchtitan, on the GPUs of one host.

    python tools/bench_dispatch.py --nproc 8 [--candidates alltoall symm_mem] [--tasks dispatch layer check]

GB/s are the bytes of rows for other GPUs, once per GPU, dispatch and combine, over the time of the whole call. The
bytes are the same for every candidate, whatever it sends. TFLOP/s of the layer are those of the experts: 6 * slots *
width * hidden in forward, twice that in backward. `--check` compares results and gradients with those of `alltoall`,
for balanced, skewed and one-sided routing. `hierarchical` and `hierarchical_symm_mem` take the ranks as two nodes. All
tasks and candidates run in the same processes (tools/time_dispatch.py). A candidate that fails or hangs is reported;
the next ones run in new processes.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dispatch_candidates import CANDIDATES, DISPATCHERS, LAYERS, PEER, ROUTINGS, TILED, Case
from rank_processes import run_jobs

WORKER = Path(__file__).with_name("time_dispatch.py")
QWEN3 = Case(tokens=16_384, width=2048, hidden=768, experts=128, choices=8)
LAYER_TOKENS = 8192
SHAPE = ("width", "hidden", "experts", "choices")
SMOKE = Case(tokens=64, width=16, hidden=8, experts=8, choices=2, kernels="grouped_mm")
TARGETS = {
    "dispatch": "target on 8 GPUs: symm_mem 280 GB/s, 1.15 x alltoall, 1.5 x torchtitan",
    "layer": "target on 8 GPUs: 250/250 TFLOP/s forward/backward, 280 with tiles; best published 238/211",
    "check": "",
}
Results = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=8, help="GPUs")
    parser.add_argument("--tasks", nargs="+", choices=TARGETS, default=["dispatch", "layer"])
    parser.add_argument("--check", dest="tasks", action="store_const", const=["check"], help="same as --tasks check")
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--routing", choices=ROUTINGS, default="random", help="random: the router's own")
    parser.add_argument("--kernels", choices=("grouped_mm", "fused"), default="fused", help="preset of perf.kernels")
    parser.add_argument("--tokens", type=int, help="per GPU; default 16,384, and 8,192 for the layer")
    for name in SHAPE:
        parser.add_argument(f"--{name}", type=int, default=getattr(QWEN3, name), help="of the layer; default Qwen3's")
    parser.add_argument("--calls", type=int, default=50, help="timed calls")
    parser.add_argument("--timeout", type=float, default=300, help="seconds per task of a candidate, and per launch")
    parser.add_argument("--out", type=Path, help="JSON file for all results")
    parser.add_argument("--smoke", action="store_true", help="a tiny case on the CPU, as a test of the script")
    args = parser.parse_args()
    cases = {task: case_of(task, args) for task in args.tasks}
    results: dict[str, Results] = {task: {} for task in cases}
    for task, name, result in run_tasks(cases, args):
        results[task][name] = result
        print(f"{task} {name}: {'failed' if 'error' in result else 'done'}", flush=True)
        if len(results[task]) == len(requested(task, args)):
            print("\n".join(["", *describe(task, cases[task], args.nproc, results[task]), ""]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1))


def case_of(task: str, args: argparse.Namespace) -> Case:
    """The case of a task, equal for all candidates."""
    if args.smoke:
        return replace(SMOKE, routing=args.routing)
    tokens = args.tokens or (LAYER_TOKENS if task == "layer" else QWEN3.tokens)
    shape = {name: getattr(args, name) for name in SHAPE}
    return replace(QWEN3, tokens=tokens, routing=args.routing, kernels=args.kernels, **shape)


def run_tasks(cases: dict[str, Case], args: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Run all tasks. Yields (task, candidate, result)."""
    command = [
        str(WORKER),
        f"--cases={json.dumps({task: asdict(case) for task, case in cases.items()})}",
        f"--calls={args.calls}",
        f"--device={'cpu' if args.smoke else 'cuda'}",
    ]
    jobs = [f"{task}:{name}" for task in cases for name in requested(task, args)]
    for job, result in run_jobs(command, jobs, args.nproc, args.timeout):
        task, name = job.split(":")
        yield task, name, result


def requested(task: str, args: argparse.Namespace) -> list[str]:
    """The candidates of a task that the command line selects."""
    return [name for name in dict.fromkeys(args.candidates) if name in candidates_of(task)]


def candidates_of(task: str) -> tuple[str, ...]:
    """The candidates of a task.

    bench_train.py measures torchtitan's layer. `alltoall` is the reference of the check. The tiled dispatcher moves
    rows inside the experts' kernels, so stub experts cannot check it.
    """
    dispatched = (*DISPATCHERS, PEER)
    checked = tuple(name for name in CANDIDATES if name not in ("alltoall", TILED))
    return {"dispatch": dispatched, "layer": LAYERS, "check": checked}[task]


def describe(task: str, case: Case, num_ranks: int, results: Results) -> Iterator[str]:
    """A heading with the case, a line for each measurement, and the target."""
    facts = next((result for result in results.values() if "device" in result), {})
    device, torch = facts.get("device", "an unknown device"), facts.get("torch", "unknown")
    yield f"{task}: {num_ranks} x {device}, torch {torch}; " + (
        f"{case.tokens:,} tokens per GPU, d {case.width}, {case.choices} of {case.experts} experts of {case.hidden}, "
        f"{case.routing} routing, kernels {case.kernels}"
    )
    lines = {"dispatch": _dispatch_lines, "layer": _layer_lines, "check": _check_lines}[task]
    good = {name: result for name, result in results.items() if "error" not in result}
    yield from lines(good, case)
    yield from (f"{name:22} failed: {result['error']}" for name, result in results.items() if "error" in result)
    if TARGETS[task]:
        yield TARGETS[task]


def timings(results: Results) -> Iterator[tuple[str, float, float]]:
    """(name, forward ms, forward and backward ms) of each candidate, eager and as a CUDA graph."""
    for name, result in results.items():
        for prefix, suffix in (("", ""), ("captured_", ", captured")):
            if f"{prefix}total_ms" in result:
                yield name + suffix, result[f"{prefix}forward_ms"], result[f"{prefix}total_ms"]


def _dispatch_lines(results: Results, case: Case) -> Iterator[str]:
    if results:
        remote_bytes = next(iter(results.values()))["remote_bytes"]
        yield f"{remote_bytes / 1e6:.0f} MB of rows per GPU are for other GPUs"
    for name, forward_ms, total_ms in timings(results):
        rates = f"{2 * remote_bytes / forward_ms / 1e6:5.0f} GB/s", f"{4 * remote_bytes / total_ms / 1e6:5.0f} GB/s"
        times = [
            f"{results[other]['forward_ms'] / forward_ms:.2f}/{results[other]['total_ms'] / total_ms:.2f} x {other}"
            for other in ("alltoall", PEER)
            if other in results and other != name
        ]
        yield (
            f"{name:22} {forward_ms:8.3f} ms {rates[0]}   with backward {total_ms:8.3f} ms {rates[1]}   "
            f"{'   '.join(times)}"
        )


def _layer_lines(results: Results, case: Case) -> Iterator[str]:
    for name, forward_ms, total_ms in timings(results):
        forward, backward = (
            case.forward_flops / forward_ms / 1e9,
            2 * case.forward_flops / (total_ms - forward_ms) / 1e9,
        )
        yield f"{name:22} {forward_ms:8.3f} ms, with backward {total_ms:8.3f} ms: {forward:.0f}/{backward:.0f} TFLOP/s"


def _check_lines(results: Results, case: Case) -> Iterator[str]:
    for name, result in results.items():
        verdict = "agrees with alltoall" if result["agrees"] else "DIFFERS from alltoall"
        errors = ", ".join(f"{routing} {error:.1e}" for routing, error in result["distances"].items())
        yield f"{name:22} {verdict}: {errors}"


if __name__ == "__main__":
    main()
