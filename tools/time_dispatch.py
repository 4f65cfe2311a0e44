"""Time dispatchers on the ranks of torchrun, or compare their results. bench_dispatch.py calls this script.

    torchrun --nproc-per-node 8 tools/time_dispatch.py dispatch:symm_mem check:symm_mem --cases JSON --out lines.json

Jobs run one after the other in the same processes, with cleanup between them. Each appends its result to the file. The
first failure ends the processes.

A call is timed between events on the device, after a small all-reduce that synchronises the ranks, so the time includes
all index computation, host reads and barriers. The figure is the median over calls of the slowest rank. Dispatchers
without host reads are also timed as a CUDA graph, which excludes launch overhead.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cleanup import free_memory
from dispatch_candidates import (
    CANDIDATES,
    PEER,
    ROUTINGS,
    Case,
    build_dispatch_only,
    build_layer,
    build_with_stub_experts,
    count_remote_rows,
    draw_choices,
    draw_rows,
)
from measurement import facts_of, max_over_ranks
from rank_processes import append_result, reporting_errors
from torch import Tensor

from titan_moe.compile.cudagraph import NUM_WARM_UPS, Recorder
from titan_moe.config.train import RunConfig
from titan_moe.run.process import process_group

READS_HOST = ("alltoall", "hierarchical", PEER)
WARM_UP_CALLS = 5
CHECKED_TOKENS = 1024
TOLERANCE = 1e-5

Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", choices=JOBS, metavar="TASK:CANDIDATE", help="run in this order")
    parser.add_argument("--cases", required=True, help="fields of dispatch_candidates.Case for each task, as JSON")
    parser.add_argument("--calls", type=int, default=50, help="timed calls")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="file for one line of JSON per job")
    args = parser.parse_args()
    cases = {task: Case(**fields) for task, fields in json.loads(args.cases).items()}
    with reporting_errors(args.out, args.jobs), process_group(RunConfig(device=args.device)) as device:
        for job in args.jobs:
            with reporting_errors(args.out, [job]):
                task, name = job.split(":")
                result = TASKS[task](name, cases[task], device, args.calls)
                if dist.get_rank() == 0:
                    append_result(args.out, [job], result | facts_of(device))
                free_memory(device)


def time_dispatch(name: str, case: Case, device: torch.device, num_calls: int) -> dict[str, Any]:
    """Time dispatch and combine alone, and count the bytes of rows for other GPUs."""
    dtype = torch.bfloat16
    run = build_dispatch_only(name, case, device, dtype)
    ids_TK, (x_TD, scores_TK) = draw_choices(case, device), draw_rows(case, device, dtype)
    grads = [torch.randn_like(output) for output in run(x_TD, ids_TK, scores_TK)]
    times = time_both(
        lambda: run(x_TD, ids_TK, scores_TK),
        lambda: torch.autograd.grad(run(x_TD, ids_TK, scores_TK), [x_TD, scores_TK], grads),
        device,
        num_calls,
        is_capturable=name not in READS_HOST,
    )
    rows = torch.tensor(count_remote_rows(case, ids_TK), dtype=torch.float64, device=device)
    dist.all_reduce(rows)
    return times | {"remote_bytes": rows.item() / dist.get_world_size() * case.width * dtype.itemsize}


def time_layer(name: str, case: Case, device: torch.device, num_calls: int) -> dict[str, Any]:
    """Time a whole MoE layer, router to combine."""
    dtype = torch.bfloat16
    layer = build_layer(name, case, device, dtype)
    x_BND = draw_rows(case, device, dtype)[0].detach()[None].requires_grad_()
    grad_BND, inputs = torch.randn_like(x_BND), [x_BND, *layer.parameters()]
    return time_both(
        lambda: layer(x_BND),
        lambda: torch.autograd.grad(layer(x_BND), inputs, grad_BND),
        device,
        num_calls,
        is_capturable=name not in READS_HOST,
    )


def check(name: str, case: Case, device: torch.device, num_calls: int) -> dict[str, Any]:
    """Compare results and gradients with those of `alltoall` in fp32: maximum error over ranks, by routing."""
    distances = {}
    for routing in ROUTINGS:
        checked = replace(case, tokens=min(case.tokens, CHECKED_TOKENS), routing=routing)
        expected, actual = (_values(dispatcher, checked, device) for dispatcher in ("alltoall", name))
        error = max(((a - e).norm() / e.norm()).item() for a, e in zip(actual, expected, strict=True))
        distances[routing] = max_over_ranks([error], device)[0]
    return {"distances": distances, "agrees": all(error < TOLERANCE for error in distances.values())}


TASKS = {"dispatch": time_dispatch, "layer": time_layer, "check": check}
JOBS = [f"{task}:{name}" for task in TASKS for name in CANDIDATES]


def time_both(
    forward: Call, both: Call, device: torch.device, num_calls: int, *, is_capturable: bool
) -> dict[str, Any]:
    """Milliseconds of forward, and of forward and backward; also as CUDA graphs if they can be captured."""
    times = {"forward_ms": median_ms(forward, device, num_calls), "total_ms": median_ms(both, device, num_calls)}
    if is_capturable and device.type == "cuda":
        recorder = Recorder()
        for name, call in (("forward_ms", forward), ("total_ms", both)):
            for _ in range(NUM_WARM_UPS):
                recorder.run(call)
            recording = recorder.record(call)
            times[f"captured_{name}"] = median_ms(recording.replay, device, num_calls)
            recording.release()  # NCCL does not shut down while a graph contains its collectives
    return times


def median_ms(call: Call, device: torch.device, num_calls: int) -> float:
    """The median over calls of the slowest rank."""
    for _ in range(WARM_UP_CALLS):
        call()
    time_calls = _time_on_gpu if device.type == "cuda" else _time_on_host
    return statistics.median(max_over_ranks(time_calls(call, device, num_calls), device))


def _time_on_gpu(call: Call, device: torch.device, num_calls: int) -> list[float]:
    zero = torch.zeros((), device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_calls)]
    for start, end in events:
        dist.all_reduce(zero)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def _time_on_host(call: Call, device: torch.device, num_calls: int) -> list[float]:
    times_ms = []
    for _ in range(num_calls):
        dist.barrier()
        start = time.perf_counter()
        call()
        times_ms.append(1e3 * (time.perf_counter() - start))
    return times_ms


def _values(name: str, case: Case, device: torch.device) -> list[Tensor]:
    """Results, and gradients of rows and scores."""
    run = build_with_stub_experts(name, case, device, torch.float32)
    ids_TK, (x_TD, scores_TK) = draw_choices(case, device), draw_rows(case, device, torch.float32)
    (y_TD,) = run(x_TD, ids_TK, scores_TK)
    values = [y_TD.detach(), *torch.autograd.grad(y_TD, [x_TD, scores_TK], y_TD.detach().cos())]
    max_over_ranks([0.0], device)  # a barrier: memory must not be freed while a peer still reads it
    return values


if __name__ == "__main__":
    main()
