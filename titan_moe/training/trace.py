"""`titan-moe trace`: a short run under the profiler, and its report."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import torch

from titan_moe.checkpoint.folders import CheckpointFolders
from titan_moe.config import Recipe, RecipeError, load_recipe
from titan_moe.config.parallel import ranks_of_a_node, resolve
from titan_moe.config.run_length import known_steps
from titan_moe.config.train import TrainConfig
from titan_moe.data.cache import folder_of
from titan_moe.kernels.device import device_name
from titan_moe.plan.choice.hardware import find_hardware
from titan_moe.plan.cost.roofline import step_work
from titan_moe.plan.pipeline.describe import simulate_step
from titan_moe.plan.pipeline.parts import training_flops_of_rank
from titan_moe.plan.resolved import Resolved
from titan_moe.profile.compile_trace import compile_report, start_records
from titan_moe.profile.lane_report import describe_lanes, lane_picture
from titan_moe.profile.lanes import read_lanes
from titan_moe.profile.report import TracedRun, TracedSteps, render
from titan_moe.profile.trace import trace_path
from titan_moe.profile.trace_parsing import Timeline, read_trace
from titan_moe.training import trainer
from titan_moe.training.steady_trace import SteadyTracer

logger = logging.getLogger("titan_moe")

MORE_STEPS = 3
"""Steps beside the traced ones, at least: the first, the profiler's warm-up, and one that is launched."""


def run(recipe: Recipe) -> None:
    """Run a recipe until its steps are steady, and a few of them under the profiler, in the folder `trace` of the run
    folder.

    Every rank writes a Chrome trace, rank 0 also the `report.html` of its own one; with a pipeline also its lanes, from
    the traces of its ranks, and their picture `pipeline.svg`. The weights are discarded.

    Raises: the errors of training; RecipeError if the folder contains the checkpoint of an interrupted trace.
    """
    short = shortened(recipe)
    folder = Path(short.run.folder)
    if any((folder / "checkpoints").glob("step-*")):
        raise RecipeError([f"{folder} has the checkpoint of an interrupted trace; remove the folder"])
    rank = int(os.environ.get("RANK", "0"))
    for earlier in (folder / "traces").glob(f"*-rank-{rank}.json"):
        earlier.unlink()
    if rank == 0:  # a trace takes the place of the one before
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    _log_weights(recipe)
    start_records()
    tracer = SteadyTracer(recipe.profile, folder, rank, short.train.steps)
    trainer.run(short, tracer)
    if rank > 0 or not trace_path(folder, tracer.first_step, rank).exists():  # stopped before the traced steps
        return
    report = folder / "report.html"
    pipeline = _pipeline(load_recipe(folder / "recipe.toml"), folder, tracer) if short.parallel.pp > 1 else ""
    timeline = read_trace(trace_path(folder, tracer.first_step, rank))
    html = render(timeline, _traced_run(short, tracer), compile_report(), pipeline)
    report.write_text(html, encoding="utf-8")
    _log_speed(tracer, timeline)
    logger.info("the report is %s", report)


def shortened(recipe: Recipe) -> Recipe:
    """The same recipe in its folder for traces, without log lines, validation and checkpoints between steps: the run
    ends when it is traced.

    Raises: RecipeError if the run is shorter than its trace.
    """
    steps, num_traced = known_steps(recipe.train) or TrainConfig.steps, recipe.profile.num_steps
    if steps < num_traced + MORE_STEPS:
        raise RecipeError(
            [
                f"train.steps = {steps} is too few for a trace of profile.num_steps = {num_traced}, which takes "
                f"{num_traced + MORE_STEPS} and more until steps are steady; raise train.steps"
            ]
        )
    run_folder = Path(recipe.run.folder)
    return replace(
        recipe,
        run=replace(recipe.run, folder=str(run_folder / "trace")),
        train=replace(recipe.train, steps=steps, tokens=0, epochs=0.0),
        data=replace(recipe.data, cache_folder=str(folder_of(recipe.data.cache_folder, run_folder))),
        validation=replace(recipe.validation, every_steps=0),
        checkpoint=replace(recipe.checkpoint, every_steps=0, save_last_step=False),
        profile=replace(recipe.profile, start_step=recipe.profile.start_step or 1),  # so that the model has regions
        metrics=replace(
            recipe.metrics, every_steps=steps, tensorboard=False, wandb=False, progress_bar=False, sample_tokens=0
        ),
    )


def _log_weights(recipe: Recipe) -> None:
    """Name the option for the run's own weights: the routing, and with it the time of experts, depends on them."""
    saved = CheckpointFolders(Path(recipe.run.folder) / "checkpoints")
    if not recipe.checkpoint.load_from and (steps := saved.complete_steps()):
        option = f"--checkpoint.load_from={saved.path(steps[-1])}"
        logger.info("this trace has initial weights and their routing; %s takes those of the run", option)


def _log_speed(tracer: SteadyTracer, timeline: Timeline) -> None:
    """Say which steps were traced, and what they take without the profiler."""
    traced_ms = timeline.duration_us / 1e3 / timeline.num_steps
    alone = f"; {tracer.step_ms:.2f} ms without it" if tracer.step_ms else ""
    steps = f"steps {tracer.first_step} to {tracer.first_step + timeline.num_steps - 1}"
    logger.info("%s, %s: %.2f ms a step under the profiler%s", steps, tracer.kind, traced_ms, alone)
    if tracer.num_timed and not tracer.is_steady:
        logger.warning(
            "these steps are not those of a long run, which %s; a larger profile.start_step waits for longer",
            "replays a CUDA graph" if tracer.kind != "replayed" else "has a capacity bound",
        )


def _traced_run(recipe: Recipe, tracer: SteadyTracer) -> TracedRun:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    is_gpu = recipe.run.device != "cpu" and torch.cuda.is_available()
    name = device_name(torch.device("cuda" if is_gpu else "cpu"))
    work = step_work(recipe, world_size)
    num_tokens = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens
    sizes = resolve(recipe.parallel, world_size)
    num_tokens //= sizes.dp * sizes.cp * sizes.tp
    flops = training_flops_of_rank(recipe, 0) * num_tokens
    title = f"{recipe.model.name} on {world_size} x {name}"
    steps = TracedSteps(tracer.first_step, tracer.kind, tracer.step_ms, tracer.num_timed)
    return TracedRun(title, work, flops, num_tokens, find_hardware(name), steps)


def _pipeline(recipe: Recipe, folder: Path, tracer: SteadyTracer) -> str:
    """The report's section about the pipeline of rank 0, which also becomes a picture in the folder. `recipe` is that
    of the run: which weight gradients are delayed depends on its kernels and device."""
    world_size = int(os.environ["WORLD_SIZE"])
    ranks = range(0, world_size, world_size // recipe.parallel.pp)
    try:
        timelines = [read_trace(trace_path(folder, tracer.first_step, rank)) for rank in ranks]
        measured = read_lanes(timelines, clocks_agree=ranks_of_a_node(world_size) == world_size)
    except (ValueError, FileNotFoundError) as error:  # a step in one graph has no actions; hosts may share no folder
        return f"<h2>Pipeline</h2><p>No lanes: {error}.</p>"
    planned = simulate_step(Resolved(recipe, world_size))
    (folder / "pipeline.svg").write_text(lane_picture(measured, planned), encoding="utf-8")
    return describe_lanes(measured, planned)
