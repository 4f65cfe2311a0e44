"""Resolve "auto" for this machine, so that the saved recipe contains the choice."""

import logging
from dataclasses import replace

import torch
import torch.distributed as dist

from titan_moe.checkpoint.rank_zero import run_on_rank_zero
from titan_moe.config import Recipe
from titan_moe.config.clones import resolve_clones
from titan_moe.config.perf import PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.kernels.device import compute_capability, device_name
from titan_moe.plan.choice import kernels as kernel_choice
from titan_moe.plan.choice.formats import choose_formats, describe_formats, keep_slower_in_compute, resolve_backend
from titan_moe.training.resolve_recompute import resolve_recompute

logger = logging.getLogger("titan_moe")


def resolve_auto(recipe: Recipe, device: torch.device) -> Recipe:
    """Resolve `precision.backend`, `perf.kernels`, `parallel.expert_clones` and `memory.recompute`.
    (`expert_rank_capacity_factor` follows the load of a run.)

    Raises: RecipeError if the device has no matrix units for a format.
    """
    recipe = resolve_formats(recipe, device)  # first: emulated experts exclude kernels
    recipe = resolve_clones(resolve_kernels(recipe, device), dist.get_world_size())
    recipe = resolve_recompute(recipe, device)  # by the memory that the rest needs
    return resolve_clones(recipe, dist.get_world_size())  # which whole blocks exclude


def resolve_formats(recipe: Recipe, device: torch.device) -> Recipe:
    """Choose backend and formats by rank 0's device, equally for all ranks, and log them.

    Raises: RecipeError if the device has no matrix units for a format.
    """
    if not recipe.precision.formats:
        return recipe

    def choose() -> PrecisionConfig:
        name, capability = device_name(device), compute_capability(device)
        backend = resolve_backend(recipe.precision, capability)
        resolved = replace(recipe, precision=replace(recipe.precision, backend=backend))
        choices = choose_formats(resolved, capability)
        logger.info("formats on %s: %s", name, "; ".join(describe_formats(resolved, choices, capability)))
        return keep_slower_in_compute(resolved.precision, choices) if backend == "native" else resolved.precision

    return replace(recipe, precision=run_on_rank_zero(choose))


def resolve_kernels(recipe: Recipe, device: torch.device) -> Recipe:
    """Choose the kernels of `auto` by rank 0's device, equally for all ranks, and log them."""
    if recipe.perf.kernels != "auto":
        return recipe

    def choose() -> PerfConfig:
        perf = kernel_choice.resolve_kernels(recipe, dist.get_world_size(), compute_capability(device))
        logger.info('perf.kernels = "auto" on %s: %s', device_name(device), kernel_choice.describe_kernels(perf))
        return perf

    return replace(recipe, perf=run_on_rank_zero(choose))
