"""Time whole optimizer steps of recipes on the ranks of torchrun. bench_train.py calls this script.

    torchrun --nproc-per-node 8 tools/time_steps.py '{"recipe": "recipes/qwen3_30b_a3b.toml", "overrides": []}' \\
        --out lines.json

A job is a recipe with overrides. Jobs run one after the other in the same processes, with cleanup between them. Each
appends its result to the file. The first job that fails, or whose memory is not freed, ends the processes. (On a CPU
the peak memory is that of the process, so it never decreases.)

A step is timed on the host between device synchronisations; the slowest rank counts. Every step has new tokens:
uniform random ones for synthetic data (drawn as in peer_torchtitan.py), else the next ones of the loader. Batches are
on the device before the timing. Loss and loads are read outside the timed interval. Weights are those of
`checkpoint.load_from`, if the recipe has it.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cleanup import check_memory, destroy_subgroups, free_memory
from kernel_times import profile_step
from measurement import facts_of, max_over_ranks
from rank_processes import append_result, reporting_errors
from torch import Tensor

from titan_moe.checkpoint.dcp import Checkpointer
from titan_moe.config import Recipe, RecipeError, load_recipe, refusals
from titan_moe.config.context import sequence_shard
from titan_moe.config.train import RunConfig
from titan_moe.data.loader import Loader, build_loader
from titan_moe.data.packing import Batch
from titan_moe.layers.attention import attention_backend
from titan_moe.metrics.experts import expert_loads, rank_loads, read_scalars
from titan_moe.parallel.mesh import Meshes
from titan_moe.run.process import process_group
from titan_moe.training.build import Assembly, assemble
from titan_moe.training.progress import Progress
from titan_moe.training.resolve_auto import resolve_auto


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", metavar="JSON", help="recipe and overrides, run in this order")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the timed ones")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="folder for kernel times of one more step each")
    parser.add_argument("--out", type=Path, required=True, help="file for one line of JSON per job")
    args = parser.parse_args()
    with reporting_errors(args.out, args.jobs):
        recipes = {job: read_job(job, args.steps + args.warmup) for job in args.jobs}
        with process_group(common_run([*recipes.values()])) as device:
            if args.profile and device.type != "cuda":
                raise ValueError("--profile needs a GPU, but this run is on the CPU; omit it")
            for job in args.jobs:
                with reporting_errors(args.out, [job]):
                    result = run_job(job, recipes[job], device, args)
                    if dist.get_rank() == 0:
                        append_result(args.out, [job], result)
                    free_memory(device)
                    destroy_subgroups()
                    check_memory(device)


def read_job(job: str, num_steps: int) -> Recipe:
    """The recipe of a job, with the given number of steps."""
    fields = json.loads(job)
    recipe = load_recipe(fields["recipe"], fields["overrides"])
    return replace(recipe, train=replace(recipe.train, steps=num_steps))


def common_run(recipes: list[Recipe]) -> RunConfig:
    """The `[run]` section for the process group of all jobs.

    Raises: RecipeError if process-wide settings differ.
    """
    settings = {(recipe.run.device, recipe.run.is_deterministic) for recipe in recipes}
    if len(settings) > 1:
        problem = "run.device and run.is_deterministic are process-wide, so recipes that differ in them cannot share"
        raise RecipeError([f"{problem} processes: use separate calls"])
    return recipes[0].run


def run_job(job: str, recipe: Recipe, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Check the recipe for these ranks, and time it."""
    if dist.get_rank() == 0:
        print(f"--- {job}", flush=True)
    problems = refusals(replace(recipe, run=replace(recipe.run, device=device.type)), dist.get_world_size())
    if problems:
        raise RecipeError(problems)
    fields = json.loads(job)
    stem = Path(fields["recipe"]).stem
    output = None
    if args.profile:
        file = args.profile / f"{fields.get('number', 0):02}-{stem}.txt"
        output = ProfileOutput(file, " ".join([stem, *fields["overrides"]]))
    return measure(resolve_auto(recipe, device), device, args.warmup, args.out.parent, output)


class ProfileOutput(NamedTuple):
    """The file for kernel times, and its heading."""

    file: Path
    heading: str


def measure(
    recipe: Recipe, device: torch.device, warmup: int, folder: Path, output: ProfileOutput | None = None
) -> dict[str, Any]:
    """Build the run as the trainer does and time its steps. `folder` is for tokenised data."""
    torch.manual_seed(recipe.run.seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    assembly = assemble(recipe, device)
    try:
        with attention_backend(recipe.perf.attention):
            loader = open_data(recipe, assembly.meshes, folder)
            if recipe.checkpoint.load_from:
                load_weights(recipe, assembly, loader)
            batches = read_batches(recipe, assembly.meshes, loader, device)
            result = time_steps(recipe, assembly, batches, device, warmup)
            if output:
                profile_step(lambda: assembly.step(batches[-1]), output.file, output.heading)
    finally:
        assembly.step.release()  # NCCL does not shut down while a graph contains its collectives
    chosen = {"kernels": asdict(recipe.perf.chosen_kernels), "recompute": [*recipe.memory.recompute]}
    return result | chosen | {"capacity_factor": assembly.step.step.capacity.capacity_factor} | facts_of(device)


def time_steps(
    recipe: Recipe, assembly: Assembly, batches: list[Batch], device: torch.device, warmup: int
) -> dict[str, Any]:
    """Take a step for each batch. Returns the figures of the steps after the warmup, and the losses of all."""
    step_ms: list[float] = []
    losses: list[float] = []
    loads: list[tuple[list[float], list[float]]] = []
    num_warmup_reruns = num_warmup_recordings = 0
    for number, batch in enumerate(batches):
        if number == warmup:
            num_warmup_reruns, num_warmup_recordings = assembly.step.num_reruns, assembly.step.num_recordings
            assembly.step.memory.reset()
        start = synchronised_time(device)
        result = assembly.step(batch)
        step_ms += max_over_ranks([1e3 * (synchronised_time(device) - start)], device)
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
        "peak_memory_gib": max_over_ranks([assembly.step.memory.gib], device)[0],
        "num_reruns": assembly.step.num_reruns - num_warmup_reruns,
        "num_warmup_reruns": num_warmup_reruns,
        "num_recordings": assembly.step.num_recordings - num_warmup_recordings,
        "num_warmup_recordings": num_warmup_recordings,
        "num_skipped": int(result.metrics["skipped_steps"]),
        "expert_load": _summary([expert for expert, _ in loads[warmup:]]),
        "rank_load": _summary([rank for _, rank in loads[warmup:]]),
    }


def open_data(recipe: Recipe, meshes: Meshes, folder: Path) -> Loader:
    """The loader of a run, with tokenised data in `folder`."""
    shard = sequence_shard(recipe.parallel, meshes.context_rank)
    return build_loader(recipe, meshes.data_rank, meshes.sizes.dp, folder, dist.barrier, shard)


def load_weights(recipe: Recipe, assembly: Assembly, loader: Loader) -> None:
    """Load the weights of `checkpoint.load_from`, as a new run does. The run folder is not read."""
    parts, states = assembly.parts, (assembly.optimizers, assembly.schedule, loader, Progress())
    with TemporaryDirectory() as empty_folder:
        checkpointer = Checkpointer(recipe, Path(empty_folder), parts, *states)
        checkpointer.load()
        checkpointer.close()


def read_batches(recipe: Recipe, meshes: Meshes, loader: Loader, device: torch.device) -> list[Batch]:
    """One batch per step."""
    if recipe.data.source == "synthetic":
        return [batch.to(device) for batch in draw_batches(recipe, meshes)]
    return [loader.next_step().to(device) for _ in range(recipe.train.steps)]


def draw_batches(recipe: Recipe, meshes: Meshes) -> Iterator[Batch]:
    """Uniform random tokens for each step. Ranks that share sequences (tp, cp, pp) draw the same ones."""
    train, shard = recipe.train, sequence_shard(recipe.parallel, meshes.context_rank)
    generator = torch.Generator().manual_seed(meshes.data_rank)
    shape = (train.global_batch_sequences // meshes.sizes.dp, train.seq_len_tokens + 1)
    for _ in range(train.steps):
        tokens = torch.randint(recipe.model.vocab_size, shape, generator=generator)
        tokens_MBN = tokens.view(-1, train.micro_batch_sequences, shape[1])
        yield Batch(tokens_MBN[..., :-1].contiguous(), tokens_MBN[..., 1:].contiguous(), None).shard(shard)


def loads_of(tokens_per_expert: dict[str, Tensor], num_ranks: int) -> tuple[list[float], list[float]]:
    """Maximum over mean load of each layer, of experts and of ranks."""
    experts = expert_loads(tokens_per_expert).values()
    ranks = rank_loads(tokens_per_expert, num_ranks).values()
    return read_scalars(list(experts)), read_scalars(list(ranks))


def _summary(loads: list[list[float]]) -> dict[str, float]:
    """Mean and worst over steps and layers; empty for a model without experts."""
    flat = [load for step_loads in loads for load in step_loads]
    return {"mean": statistics.mean(flat), "worst": max(flat)} if flat else {}


def synchronised_time(device: torch.device) -> float:
    """The host's time in seconds, after synchronising with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
