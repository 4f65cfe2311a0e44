"""Time ways to send rows on the ranks that torchrun started, or compare their results; bench_dispatch.py calls it.

    torchrun --nproc-per-node 8 tools/time_dispatch.py dispatch:symm_mem check:symm_mem --cases JSON --out lines.json

Jobs follow each other in the same processes, and each leaves the next one the memory and the compiler as it found them.
Its figures are a line of the file as soon as it has them; the first job that fails ends the processes.

A call is timed between events on the device, after a small all-reduce that lets all ranks begin together: the plan,
what the host reads of it and every barrier are in the time. The slowest rank of each call counts, and of the calls the
median. Ways that read nothing on the host are also timed as a CUDA graph, which leaves out what the host needs to
launch them.
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
from cleanup import forget
from dispatch_candidates import (
    CANDIDATES,
    PEER,
    ROUTINGS,
    Case,
    build_layer,
    build_mover,
    build_server,
    count_remote_rows,
    draw_choices,
    draw_rows,
)
from rank_processes import add_line, telling
from torch import Tensor

from titan_moe.compile.cudagraph import NUM_WARM_UPS, Recorder
from titan_moe.config.train import RunConfig
from titan_moe.train.process import process_group

READS_HOST = ("alltoall", PEER)
WARM_UP_CALLS = 5
CHECKED_TOKENS = 1024
TOLERANCE = 1e-5

Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", choices=JOBS, metavar="TASK:CANDIDATE", help="done in this order")
    parser.add_argument("--cases", required=True, help="fields of dispatch_candidates.Case for each task, as JSON")
    parser.add_argument("--calls", type=int, default=50, help="timed calls")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="file that gets a line of JSON for each job")
    args = parser.parse_args()
    cases = {task: Case(**fields) for task, fields in json.loads(args.cases).items()}
    with telling(args.out, args.jobs), process_group(RunConfig(device=args.device)) as device:
        for job in args.jobs:
            with telling(args.out, [job]):
                task, name = job.split(":")
                result = TASKS[task](name, cases[task], device, args.calls)
                if dist.get_rank() == 0:
                    add_line(args.out, [job], result | facts_of(device))
                forget(device)


def facts_of(device: torch.device) -> dict[str, str]:
    """What figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": str(torch.__version__)}


def time_dispatch(name: str, case: Case, device: torch.device, num_calls: int) -> dict[str, Any]:
    """Dispatch and combine alone, and the bytes that leave a GPU with them."""
    dtype = torch.bfloat16
    move = build_mover(name, case, device, dtype)
    ids_TK, (x_TD, scores_TK) = draw_choices(case, device), draw_rows(case, device, dtype)
    grads = [torch.randn_like(output) for output in move(x_TD, ids_TK, scores_TK)]
    times = time_both(
        lambda: move(x_TD, ids_TK, scores_TK),
        lambda: torch.autograd.grad(move(x_TD, ids_TK, scores_TK), [x_TD, scores_TK], grads),
        device,
        num_calls,
        is_capturable=name not in READS_HOST,
    )
    rows = torch.tensor(count_remote_rows(case, ids_TK), dtype=torch.float64, device=device)
    dist.all_reduce(rows)
    return times | {"remote_bytes": rows.item() / dist.get_world_size() * case.width * dtype.itemsize}


def time_layer(name: str, case: Case, device: torch.device, num_calls: int) -> dict[str, Any]:
    """A whole MoE layer, router to combine."""
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
    """How far results and gradients are from those of `alltoall`, in fp32, by routing; the worst of all ranks."""
    distances = {}
    for routing in ROUTINGS:
        part = replace(case, tokens=min(case.tokens, CHECKED_TOKENS), routing=routing)
        expected, actual = (_values(way, part, device) for way in ("alltoall", name))
        far = max(((a - e).norm() / e.norm()).item() for a, e in zip(actual, expected, strict=True))
        distances[routing] = _largest([far], device)[0]
    return {"distances": distances, "agrees": all(far < TOLERANCE for far in distances.values())}


TASKS = {"dispatch": time_dispatch, "layer": time_layer, "check": check}
JOBS = [f"{task}:{name}" for task in TASKS for name in CANDIDATES]


def time_both(
    forward: Call, both: Call, device: torch.device, num_calls: int, *, is_capturable: bool
) -> dict[str, Any]:
    """Milliseconds of forward, and of forward and backward; the same of both as graphs where they can be recorded."""
    times = {"forward_ms": median_ms(forward, device, num_calls), "total_ms": median_ms(both, device, num_calls)}
    if is_capturable and device.type == "cuda":
        recorder = Recorder()
        for name, call in (("forward_ms", forward), ("total_ms", both)):
            for _ in range(NUM_WARM_UPS):
                recorder.run(call)
            recording = recorder.record(call)
            times[f"captured_{name}"] = median_ms(recording.replay, device, num_calls)
            recording.release()  # NCCL does not shut down while a recording holds messages
    return times


def median_ms(call: Call, device: torch.device, num_calls: int) -> float:
    """Of the calls, each as slow as its slowest rank."""
    for _ in range(WARM_UP_CALLS):
        call()
    time_calls = _time_on_gpu if device.type == "cuda" else _time_on_host
    return statistics.median(_largest(time_calls(call, device, num_calls), device))


def _time_on_gpu(call: Call, device: torch.device, num_calls: int) -> list[float]:
    together = torch.zeros((), device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_calls)]
    for begin, end in events:
        dist.all_reduce(together)
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in events]


def _time_on_host(call: Call, device: torch.device, num_calls: int) -> list[float]:
    times_ms = []
    for _ in range(num_calls):
        dist.barrier()
        begin = time.perf_counter()
        call()
        times_ms.append(1e3 * (time.perf_counter() - begin))
    return times_ms


def _values(name: str, case: Case, device: torch.device) -> list[Tensor]:
    """Results, and gradients of rows and scores."""
    serve = build_server(name, case, device, torch.float32)
    ids_TK, (x_TD, scores_TK) = draw_choices(case, device), draw_rows(case, device, torch.float32)
    (y_TD,) = serve(x_TD, ids_TK, scores_TK)
    values = [y_TD.detach(), *torch.autograd.grad(y_TD, [x_TD, scores_TK], y_TD.detach().cos())]
    _largest([0.0], device)  # nobody gives memory back that a peer may still read
    return values


def _largest(values: list[float], device: torch.device) -> list[float]:
    """Each value as the rank has it that has most."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


if __name__ == "__main__":
    main()
