"""What a run says at its start and at its end."""

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titan_moe.checkpoint.folders import CheckpointFolders
from titan_moe.config import Recipe
from titan_moe.config.experimental import describe_experimental
from titan_moe.config.model import ModelConfig
from titan_moe.config.run_length import step_tokens
from titan_moe.config.schema import counted
from titan_moe.data.sources import DataSize
from titan_moe.plan.cost.count import describe_trained
from titan_moe.training.count_class import FLOPS_HOOK, ModelCounts
from titan_moe.training.run_folder import command_to_go_on

logger = logging.getLogger("titan_moe")


def log_start(recipe: Recipe, counts: ModelCounts, device: torch.device) -> None:
    """Log model, ranks and folder, and warn of ignored data, experimental options and forced routing."""
    model, data = recipe.model, recipe.data
    ranks = f"{dist.get_world_size()} x {device.type}"
    logger.info("%s: %s; %s; writing to %s", model.name, counts.in_words(), ranks, Path(recipe.run.folder))
    if model.class_ == ModelConfig.class_ and (trained := describe_trained(recipe)):
        logger.info("trained: %s", trained)
    if counts.flops_per_token is None:
        way_out = f"let it define {FLOPS_HOOK}(seq_len_tokens)"
        words = 'the FLOPs of model.class = "%s" are unknown, so the metrics have neither TFLOP/s nor MFU: %s; %s'
        logger.info(words, model.class_, counts.reason, way_out)
    if data.source == "synthetic" and data.path:
        logger.warning('data.path = "%s" is not read: data.source = "synthetic"', data.path)
    if experimental := describe_experimental(recipe):
        logger.warning(experimental)
    if recipe.train.forces_load:
        effect = "the router's choice is replaced, for benchmarks and tests only"
        logger.warning('train.forced_load = "%s": %s', recipe.train.forced_load, effect)


def log_data(recipe: Recipe, size: DataSize, samples_per_epoch: int, counts: ModelCounts) -> None:
    """Log how much data there is, what is held out, and how often a run reads it."""
    train, parts = recipe.train, []
    num_tokens = train.batch_sizes.total(train.steps) * train.seq_len_tokens
    if size.num_tokens is not None:
        parts.append(f"{size.num_tokens:,} tokens{_documents(size.num_documents)}")
    if size.held_out_tokens:
        is_end = size.num_documents == 1
        parts.append(
            f"held out {size.held_out_tokens:,}{', its end' if is_end else _documents(size.held_out_documents)}"
        )
    for name, path in {"": recipe.validation.path, **recipe.validation.sets}.items():
        parts += [f"validation{f' {name}' if name else ''} on {path}"] if path else []
    if samples_per_epoch:
        parts.append(f"an epoch is {samples_per_epoch * train.seq_len_tokens:,} tokens")
    epochs = f", {num_tokens / (samples_per_epoch * train.seq_len_tokens):.3g} epochs" if samples_per_epoch else ""
    most = "up to " if train.batch_schedule else ""
    run = f"this run is {counted(train.steps, 'step')} of {most}{step_tokens(train):,}: {num_tokens:,} tokens{epochs}"
    a_parameter = f", {num_tokens / counts.parameters:.3g} a parameter" if counts.parameters else ""
    active = f" ({num_tokens / counts.active:.3g} an active one)" if counts.active else ""
    logger.info("data: %s", "; ".join([*parts, run + a_parameter + active]))
    if train.steps < recipe.optim.warmup_steps:
        words = "train.steps = %d end inside optim.warmup_steps = %d: optim.lr = %g is not reached"
        logger.warning(words, train.steps, recipe.optim.warmup_steps, recipe.optim.lr)
    for source in size.sources:
        facts = "streamed" if source.num_tokens is None else f"{source.num_tokens:,} tokens"
        if source.share == 0:
            facts = "not read"
        num_samples = train.batch_sizes.total(train.steps) * source.share
        epochs = (
            f", {num_samples / source.samples_per_epoch:.3g} epochs of this run" if source.samples_per_epoch else ""
        )
        logger.info("  %s: %s, share %.4g%s", source.name, facts, source.share, epochs)


def _documents(number: int | None) -> str:
    return "" if number is None else f" in {number:,} document{'s' * (number != 1)}"


def log_end(
    steps: tuple[int, int], seconds: float, last_losses: Mapping[str, float], folders: CheckpointFolders
) -> None:
    """Log the first and the last step, the final losses, the time taken, and the place of the model."""
    losses = ", ".join(f"{name} {loss:.4f}" for name, loss in last_losses.items())
    logger.info("finished steps %d to %d in %s: %s", *steps, timedelta(seconds=round(seconds)), losses)
    if steps[1] in folders.complete_steps():
        logger.info("the model is in %s", folders.path(steps[1]))
    else:
        logger.info("the model is not saved")


def describe_divergence(run_folder: Path, step: int, num_skipped: int, saved_steps: Sequence[int]) -> str:
    """Why a run ended in skipped steps, and the ways out."""
    last_update = step - num_skipped
    last = "the last step" if num_skipped == 1 else f"the last {num_skipped} steps"
    found = f"continues after step {saved_steps[-1]}, its newest checkpoint" if saved_steps else "starts again"
    if saved_steps and saved_steps[-1] > last_update:
        found += f", with the weights of step {last_update}; it continues from an older one if newer ones are removed"
    return (
        f"{run_folder} ended at step {step}: the gradients of {last} were not finite, so "
        "nothing was updated, and this step is not saved; lower optim.lr, raise optim.warmup_steps, or take other "
        f"weights with checkpoint.load_from in another run.folder ({command_to_go_on(run_folder)} {found})"
    )
