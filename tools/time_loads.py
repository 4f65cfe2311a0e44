"""Time steps of several MoE layers under a load, on the ranks of torchrun. bench_loads.py calls this script.

    torchrun --nproc-per-node 8 tools/time_loads.py bursts:arena bursts:alltoall --case JSON --out lines.json

A step is forward and backward of the layers, without a model: dispatch, experts, combine and a residual each. The step
runner and the capacity control are those of a run, so that a step whose rows overflow is taken again, and all sizes
follow the load. Ids of a step are drawn before it.

Jobs run one after the other in the same processes, with cleanup between them. A step is timed on the host, from a
barrier to the end of its kernels. The figures are of the slowest rank of each step.
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cleanup import GIB, free_memory
from dispatch_candidates import TILED, Case, build_dispatcher
from measurement import facts_of, max_over_ranks
from rank_processes import append_result, reporting_errors
from torch import Tensor

from titan_moe.config.forced_loads import DRAWN_LOADS
from titan_moe.config.kernels import PRESETS
from titan_moe.config.train import RunConfig
from titan_moe.dispatch import TokenDispatcher
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.kernels.choose import choose_expert_mlp
from titan_moe.kernels.experts.arena import Arena
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.forced_loads import draw_ids, generator_of
from titan_moe.plan.cost.loads import LayerLoads, visit_probability
from titan_moe.run.process import process_group
from titan_moe.training.capacity_control import CALIBRATION_STEPS, CapacityControl, largest_factor
from titan_moe.training.peak_memory import PeakMemory
from titan_moe.training.step_runner import StepRunner

EXACT = "alltoall"
"""Sizes are read on the host."""
CANDIDATES = {EXACT: EXACT, "arena": TILED, "arena_tile": TILED, "allgather": "allgather"}
"""Candidate -> dispatcher. `arena_tile` overlaps communication with tiles. `allgather` bounds each layer."""
WARM_UP_STEPS = CALIBRATION_STEPS + 2
"""Steps without a bound, and two with one, whose kernels are compiled."""


class Batch(NamedTuple):
    """The inputs of a step on this rank."""

    tokens_MBN: Tensor  # rows [T, D] here; the step runner asks for their device
    grad_TD: Tensor
    ids: list[Tensor]  # [T, K] of each layer
    scores: list[Tensor]  # [T, K] of each layer


class LayersStep:
    """Stands for a run's `TrainStep`: forward and backward of the layers, and the loads of all ranks."""

    def __init__(self, dispatcher: TokenDispatcher, layers: list[GroupedExperts]) -> None:
        self.dispatcher, self.layers, self.capacity = dispatcher, layers, dispatcher.capacity

    def __call__(self, batch: Batch) -> Any:
        self.capacity.reset()
        self.capacity.start_forward()
        x_TD = batch.tokens_MBN.detach().requires_grad_()
        y_TD = x_TD
        for experts, ids_TK, scores_TK in zip(self.layers, batch.ids, batch.scores, strict=True):
            inputs = self.dispatcher.dispatch(y_TD, ids_TK, scores_TK)
            y_TD = y_TD + self.dispatcher.combine(experts(inputs), inputs)
        y_TD.backward(batch.grad_TD)
        for tensor in (*batch.scores, *(weight for experts in self.layers for weight in experts.parameters())):
            tensor.grad = None
        loads = torch.stack([self.capacity.invalidates_step.float(), self.capacity.needed_factor()])
        dist.all_reduce(loads, dist.ReduceOp.MAX)
        metrics = {"has_overflowed": loads[0], "needed_factor": loads[1], "grad_norm": torch.ones_like(loads[1])}
        return SimpleNamespace(metrics=metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = [f"{load}:{candidate}" for load in DRAWN_LOADS for candidate in CANDIDATES]
    parser.add_argument("jobs", nargs="+", choices=jobs, metavar="LOAD:CANDIDATE", help="run in this order")
    parser.add_argument("--case", required=True, help="fields of dispatch_candidates.Case, as JSON")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="file for one line of JSON per job")
    args = parser.parse_args()
    case = Case(**json.loads(args.case))
    with reporting_errors(args.out, args.jobs), process_group(RunConfig(device=args.device)) as device:
        for job in args.jobs:
            with reporting_errors(args.out, [job]):
                result = time_load(*job.split(":"), case, args.layers, args.steps, device)
                if dist.get_rank() == 0:
                    append_result(args.out, [job], result | facts_of(device))
                free_memory(device)


def time_load(
    load: str,
    candidate: str,
    case: Case,
    num_layers: int,
    num_steps: int,
    device: torch.device,
    num_warm_ups: int = WARM_UP_STEPS,
) -> dict[str, Any]:
    """Time steps under a load, after the warm-up. Need, reruns, factor and arena are those of all ranks."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    runner = build_runner(candidate, case, num_layers, device)
    times_ms, needs, reruns_before = [], [], 0
    for step in range(num_warm_ups + num_steps):
        if step == num_warm_ups:
            reruns_before = runner.num_reruns
        milliseconds = _time_step(runner, draw_batch(load, case, num_layers, step, device), device)
        if step >= num_warm_ups:
            times_ms.append(milliseconds)
            needs.append(runner.needed_factor)
    *times_ms, peak_gib = max_over_ranks([*times_ms, runner.memory.gib], device)
    arena = runner.step.capacity.arena
    return {
        "mean_ms": statistics.mean(times_ms),
        "median_ms": statistics.median(times_ms),
        "worst_ms": max(times_ms),
        "num_reruns": runner.num_reruns - reruns_before,
        "need": max(needs),
        "factor": runner.capacity_factor,
        "arena_gib": arena.num_bytes / GIB if arena else 0.0,
        "peak_gib": peak_gib,
    }


def build_runner(candidate: str, case: Case, num_layers: int, device: torch.device) -> StepRunner:
    """The layers of a candidate, in the loop of a run."""
    num_ranks, dtype = dist.get_world_size(), torch.bfloat16 if device.type == "cuda" else torch.float32
    dispatcher: Any = build_dispatcher(CANDIDATES[candidate], case, device, dtype)
    dispatcher.capacity = capacity = ExpertCapacity(0.0, device)
    if CANDIDATES[candidate] == TILED:
        dispatcher.overlaps = candidate == "arena_tile"
        arena = Arena(case.width, case.hidden, dtype, device)
        capacity.use_arena(arena, layer_loads(case, num_layers, num_ranks))
    mlp = choose_expert_mlp(PRESETS[case.kernels].experts, "activation")
    layers = [GroupedExperts(case.experts // num_ranks, case.width, case.hidden, mlp) for _ in range(num_layers)]
    for number, layer in enumerate(layers):
        generator = torch.Generator(device).manual_seed(number * num_ranks + dist.get_rank())
        for parameter in layer.parameters():
            drawn = torch.randn(parameter.shape, device=device, generator=generator)
            parameter.data = (drawn / parameter.shape[-1] ** 0.5).to(dtype)
    memory = PeakMemory(capacity)
    controllers = [] if candidate == EXACT else [CapacityControl(partial(largest_factor, memory))]
    schedule: Any = SimpleNamespace(step=lambda: None)
    step: Any = LayersStep(dispatcher, layers)
    return StepRunner(step, schedule, controllers=controllers, memory=memory)


def layer_loads(case: Case, num_layers: int, num_ranks: int) -> LayerLoads:
    """Balanced and largest loads of a rank."""
    num_local, worst_rows = case.experts // num_ranks, num_ranks * case.tokens
    rows = worst_rows * visit_probability(case.experts, num_local, case.choices)
    worst_slots = worst_rows * min(case.choices, num_local)
    return LayerLoads(num_layers, rows, case.tokens * case.choices, worst_rows, worst_slots)


def draw_batch(load: str, case: Case, num_layers: int, step: int, device: torch.device) -> Batch:
    """The same for every candidate."""
    generators = [generator_of(dist.get_rank(), layer, step, device) for layer in range(num_layers)]
    ids = [
        draw_ids(
            load,
            num_tokens=case.tokens,
            num_experts=case.experts,
            top_k=case.choices,
            num_ranks=dist.get_world_size(),
            layer=layer,
            step=step,
            generator=generator,
        )
        for layer, generator in enumerate(generators)
    ]
    shape, dtype = (case.tokens, case.width), torch.bfloat16 if device.type == "cuda" else torch.float32
    x_TD, grad_TD = (torch.randn(shape, device=device, generator=generators[0]).to(dtype) for _ in range(2))
    scores = [torch.rand(ids_TK.shape, device=device, generator=generators[0]).requires_grad_() for ids_TK in ids]
    return Batch(x_TD, grad_TD, ids, scores)


def _time_step(runner: StepRunner, batch: Any, device: torch.device) -> float:
    """Milliseconds on this rank, from a barrier on."""
    dist.all_reduce(torch.zeros((), device=device))
    _synchronize(device)
    start = time.perf_counter()
    runner(batch)
    _synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
