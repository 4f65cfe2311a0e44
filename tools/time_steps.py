"""Time whole optimizer steps of recipes on the ranks that torchrun started; bench_train.py calls it.

    torchrun --nproc-per-node 8 tools/time_steps.py '{"recipe": "recipes/qwen3_30b_a3b.toml", "overrides": []}' \\
        --out lines.json

Each job names a recipe and its overrides. Jobs follow each other in the same processes, and each leaves the next one
memory, compiler and process groups as it found them. Its figures are a line of the file as soon as it has them; the
first job that fails, or leaves much memory behind, ends the processes. (On a CPU the peak memory is the process's own,
so it never falls.)

A step is timed on the host between device synchronisations, and the slowest rank counts. Batches are on the device
before the clock starts: uniform random tokens where `data.source` is synthetic, else what the loader reads. What is
read of a step, its loss and how tokens fell on experts and ranks, is read between the clocks.
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cleanup import forget, leave_groups, refuse_leftovers
from kernel_times import profile_step
from rank_processes import add_line, telling
from torch import Tensor

from titan_moe.config import Recipe, RecipeError, check_rules, load_recipe
from titan_moe.config.train import RunConfig
from titan_moe.data.loader import build_loader
from titan_moe.data.packing import Batch
from titan_moe.layers.attention import attention_backend
from titan_moe.metrics.experts import expert_loads, rank_loads, read_scalars
from titan_moe.metrics.throughput import peak_memory_gib
from titan_moe.parallel.mesh import Meshes
from titan_moe.train.build import Assembly, assemble
from titan_moe.train.process import process_group
from titan_moe.train.resolve_kernels import resolve_kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", metavar="JSON", help="recipe and overrides, done in this order")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="gets the kernel times of one more step of each")
    parser.add_argument("--out", type=Path, required=True, help="file that gets a line of JSON for each job")
    args = parser.parse_args()
    with telling(args.out, args.jobs):
        recipes = {job: read_job(job, args.steps + args.warmup) for job in args.jobs}
        with process_group(common_run([*recipes.values()])) as device:
            if args.profile and device.type != "cuda":
                raise ValueError("--profile records a GPU's kernels, and this run computes on the CPU; leave it out")
            for job in args.jobs:
                with telling(args.out, [job]):
                    result = do(job, recipes[job], device, args)
                    if dist.get_rank() == 0:
                        add_line(args.out, [job], result)
                    forget(device)
                    leave_groups()
                    refuse_leftovers(device)


def read_job(job: str, num_steps: int) -> Recipe:
    """The recipe of a job, for so many steps."""
    told = json.loads(job)
    recipe = load_recipe(told["recipe"], told["overrides"])
    return replace(recipe, train=replace(recipe.train, steps=num_steps))


def common_run(recipes: list[Recipe]) -> RunConfig:
    """What the process group of all is made for.

    Raises: RecipeError if they differ in what holds for a whole process.
    """
    kinds = {(recipe.run.device, recipe.run.is_deterministic) for recipe in recipes}
    if len(kinds) > 1:
        problem = (
            "run.device and run.is_deterministic hold for whole processes; recipes that differ in them cannot share"
        )
        raise RecipeError([f"{problem} processes: call for each kind on its own"])
    return recipes[0].run


def do(job: str, recipe: Recipe, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Check that the recipe can run on these ranks, and time it."""
    if dist.get_rank() == 0:
        print(f"--- {job}", flush=True)
    problems = check_rules(replace(recipe, run=replace(recipe.run, device=device.type)), dist.get_world_size())
    if problems:
        raise RecipeError(problems)
    told = json.loads(job)
    stem = Path(told["recipe"]).stem
    profiled = None
    if args.profile:
        profiled = Profiled(
            args.profile / f"{told.get('number', 0):02}-{stem}.txt", " ".join([stem, *told["overrides"]])
        )
    return measure(resolve_kernels(recipe, device), device, args.warmup, args.out.parent, profiled)


class Profiled(NamedTuple):
    """Where the kernel times of a further step go."""

    file: Path
    heading: str


def measure(
    recipe: Recipe, device: torch.device, warmup: int, folder: Path, profiled: Profiled | None = None
) -> dict[str, Any]:
    """Build the run as the trainer does and time its steps; texts are tokenised into `folder`."""
    torch.manual_seed(recipe.run.seed)
    _forget_peak(device)
    assembly = assemble(recipe, device)
    try:
        with attention_backend(recipe.perf.attention):
            drawn = batches(recipe, assembly.meshes, device, folder)
            result = time_steps(recipe, assembly, drawn, device, warmup)
            if profiled:
                profile_step(lambda: assembly.step(drawn[-1]), profiled.file, profiled.heading)
    finally:
        assembly.step.release()  # NCCL does not shut down while a recording holds messages
    return result | {
        "kernels": asdict(recipe.perf.chosen_kernels),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": str(torch.__version__),
    }


def time_steps(
    recipe: Recipe, assembly: Assembly, drawn: list[Batch], device: torch.device, warmup: int
) -> dict[str, Any]:
    """Take a step for each batch; what is found out about those after the warm-up."""
    step_ms: list[float] = []
    losses: list[float] = []
    loads: list[tuple[list[float], list[float]]] = []
    num_early_reruns = 0
    for number, batch in enumerate(drawn):
        if number == warmup:
            num_early_reruns = assembly.step.num_reruns
            _forget_peak(device)
        begin = _now(device)
        result = assembly.step(batch)
        step_ms.append(_largest(1e3 * (_now(device) - begin), device))
        losses.append(result.loss.item())
        loads.append(loads_of(result.tokens_per_expert, recipe.parallel.ep))
    median_ms = statistics.median(step_ms[warmup:])
    num_tokens = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens // dist.get_world_size()
    return {
        "tokens_per_second_per_gpu": num_tokens / median_ms * 1e3,
        "median_step_ms": median_ms,
        "step_ms": step_ms,
        "losses": losses,
        "is_finite": all(map(math.isfinite, losses)),
        "peak_memory_gib": _largest(peak_memory_gib(device), device),
        "num_reruns": assembly.step.num_reruns - num_early_reruns,
        "num_skipped": int(result.num_skipped),
        "expert_load": _summary([expert for expert, _ in loads[warmup:]]),
        "rank_load": _summary([rank for _, rank in loads[warmup:]]),
    }


def batches(recipe: Recipe, meshes: Meshes, device: torch.device, folder: Path) -> list[Batch]:
    """One a step; random tokens are the same in every step."""
    train = recipe.train
    if recipe.data.source == "synthetic":
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        num_mine = train.global_batch_sequences // meshes.sizes.dp * train.seq_len_tokens
        tokens = torch.randint(recipe.model.vocab_size, (num_mine,), device=device, generator=generator)
        tokens_MBN = tokens.view(-1, train.micro_batch_sequences, train.seq_len_tokens)
        return [Batch(tokens_MBN, tokens_MBN.roll(-1, -1), None)] * train.steps
    loader = build_loader(recipe, meshes.data_rank, meshes.sizes.dp, folder, dist.barrier)
    return [loader.next_step().to(device) for _ in range(train.steps)]


def loads_of(tokens_per_expert: dict[str, Tensor], num_ranks: int) -> tuple[list[float], list[float]]:
    """The busiest expert's tokens over the mean, layer by layer, and the busiest rank's."""
    experts = expert_loads(tokens_per_expert).values()
    ranks = rank_loads(tokens_per_expert, num_ranks).values()
    return read_scalars(list(experts)), read_scalars(list(ranks))


def _summary(loads: list[list[float]]) -> dict[str, float]:
    """Mean and worst over steps and layers; nothing for a model without experts."""
    flat = [load for of_step in loads for load in of_step]
    return {"mean": statistics.mean(flat), "worst": max(flat)} if flat else {}


def _now(device: torch.device) -> float:
    """The host's clock, in seconds, once the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _largest(value: float, device: torch.device) -> float:
    """The largest that any rank has."""
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


if __name__ == "__main__":
    main()
