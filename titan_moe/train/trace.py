"""`titan-moe trace`: a short run under the profiler, and its report."""

import logging
import os
from dataclasses import fields, replace
from pathlib import Path

import torch

from titan_moe.checkpoint.folders import CheckpointFolders
from titan_moe.compile.cudagraph import NUM_WARM_UPS
from titan_moe.config import Recipe, RecipeError, load_recipe
from titan_moe.config.parallel import ranks_of_a_node, resolve
from titan_moe.kernels.device import device_name
from titan_moe.plan.hardware import find_hardware
from titan_moe.plan.pipeline.describe import simulate_step
from titan_moe.plan.pipeline.parts import training_flops_of_rank
from titan_moe.plan.roofline import Work, step_work
from titan_moe.profile.compile_trace import compile_report, start_records
from titan_moe.profile.lane_report import describe_lanes, lane_picture
from titan_moe.profile.lanes import read_lanes
from titan_moe.profile.report import TracedRun, render
from titan_moe.profile.trace import trace_path
from titan_moe.profile.trace_parsing import read_trace
from titan_moe.train import trainer

logger = logging.getLogger("titan_moe")

FIRST_TRACED_STEP = 5
"""The steps before it compile, autotune and allocate."""
INSIDE_A_BLOCK = ("attention", "dense", "router", "latent", "dispatch", "experts", "combine", "shared")
"""Parts without a region of their own if a block is one graph."""


def run(recipe: Recipe) -> None:
    """Run a few steps of a recipe under the profiler, in the folder `trace` of the run folder.

    Every rank writes a Chrome trace, rank 0 also the `report.html` of its own one; with a pipeline also its lanes, from
    the traces of its ranks, and their picture `pipeline.svg`. The weights are discarded.

    Raises: the errors of training; RecipeError if the folder contains the checkpoint of an interrupted trace.
    """
    short = shortened(recipe)
    folder = Path(short.run.folder)
    if any((folder / "checkpoints").glob("step-*")):
        raise RecipeError([f"{folder} has the checkpoint of an interrupted trace; remove the folder"])
    rank = int(os.environ.get("RANK", "0"))
    path = trace_path(short.profile, folder, rank)
    path.unlink(missing_ok=True)
    if rank == 0:  # a trace takes the place of the one before
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    _log_weights(recipe)
    start_records()
    trainer.run(short)
    if rank > 0 or not path.exists():  # no trace: the run was stopped before the traced steps
        return
    report = folder / "report.html"
    pipeline = _pipeline(load_recipe(folder / "recipe.toml"), folder) if short.parallel.pp > 1 else ""
    html = render(read_trace(path, recipe.profile.num_steps), _traced_run(short), compile_report(), pipeline)
    report.write_text(html, encoding="utf-8")
    logger.info("the report is %s", report)
    if short.compile.compiles_blocks(_device(short).type):
        way_out = 'compile.extent = "pieces" breaks them down'
        logger.info('compile.extent = "block": the report has blocks as one part; %s', way_out)


def shortened(recipe: Recipe) -> Recipe:
    """The same recipe with few steps, and without log lines, validation and checkpoints between them.

    One step follows the traced ones: the last step of a run is logged, and reading its loss stalls the device. With
    CUDA graphs, two more steps are traced first: an eager one, which attributes kernels to parts, and the capture.
    """
    is_captured = recipe.compile.cudagraph != "off"
    first_step = NUM_WARM_UPS if is_captured else recipe.profile.start_step or FIRST_TRACED_STEP
    num_traced = recipe.profile.num_steps + (2 if is_captured else 0)
    steps = first_step + num_traced
    run_folder = Path(recipe.run.folder)
    return replace(
        recipe,
        run=replace(recipe.run, folder=str(run_folder / "trace")),
        train=replace(recipe.train, steps=steps),
        data=replace(recipe.data, cache_folder=recipe.data.cache_folder or str(run_folder / "cache")),
        validation=replace(recipe.validation, every_steps=0),
        checkpoint=replace(recipe.checkpoint, every_steps=0, save_last_step=False),
        metrics=replace(recipe.metrics, every_steps=steps, tensorboard=False, progress_bar=False, sample_tokens=0),
        profile=replace(recipe.profile, start_step=first_step, num_steps=num_traced),
    )


def _log_weights(recipe: Recipe) -> None:
    """Name the option for the run's own weights: the routing, and with it the time of experts, depends on them."""
    saved = CheckpointFolders(Path(recipe.run.folder) / "checkpoints")
    if not recipe.checkpoint.load_from and (steps := saved.complete_steps()):
        option = f"--checkpoint.load_from={saved.path(steps[-1])}"
        logger.info("this trace has initial weights and their routing; %s takes those of the run", option)


def _traced_run(recipe: Recipe) -> TracedRun:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = _device(recipe)
    name = device_name(device)
    work = step_work(recipe, world_size)
    if recipe.compile.compiles_blocks(device.type):
        work = _in_blocks(work)
    num_tokens = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens
    sizes = resolve(recipe.parallel, world_size)
    num_tokens //= sizes.dp * sizes.cp * sizes.tp
    flops = training_flops_of_rank(recipe, 0) * num_tokens
    title = f"{recipe.model.name} on {world_size} x {name}"
    return TracedRun(title, work, flops, num_tokens, find_hardware(name))


def _pipeline(recipe: Recipe, folder: Path) -> str:
    """The report's section about the pipeline of rank 0, which also becomes a picture in the folder. `recipe` is that
    of the run: which weight gradients are delayed depends on its kernels and device."""
    world_size = int(os.environ["WORLD_SIZE"])
    ranks = range(0, world_size, world_size // recipe.parallel.pp)
    try:
        timelines = [read_trace(trace_path(recipe.profile, folder, rank)) for rank in ranks]
        measured = read_lanes(timelines, clocks_agree=ranks_of_a_node(world_size) == world_size)
    except (ValueError, FileNotFoundError) as error:  # a step in one graph has no actions; hosts may share no folder
        return f"<h2>Pipeline</h2><p>No lanes: {error}.</p>"
    planned = simulate_step(recipe, world_size)
    (folder / "pipeline.svg").write_text(lane_picture(measured, planned), encoding="utf-8")
    return describe_lanes(measured, planned)


def _in_blocks(work: dict[str, Work]) -> dict[str, Work]:
    """The same work, with the parts inside a block summed up as "block"."""
    inside = [work[part] for part in INSIDE_A_BLOCK if part in work]
    sums = {field.name: sum(getattr(part, field.name) for part in inside) for field in fields(Work)}
    return {part: amount for part, amount in work.items() if part not in INSIDE_A_BLOCK} | {"block": Work(**sums)}


def _device(recipe: Recipe) -> torch.device:
    is_gpu = recipe.run.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if is_gpu else "cpu")
