"""Resolve the fields of `[precision]` that depend on the device, so that the saved recipe contains the choice."""

import logging
from dataclasses import replace

import torch

from titan_moe.checkpoint.rank_zero import run_on_rank_zero
from titan_moe.config import Recipe
from titan_moe.config.precision import PrecisionConfig
from titan_moe.kernels.device import compute_capability, device_name
from titan_moe.plan.choice.formats import choose_formats, describe_formats, keep_slower_in_compute, resolve_backend

logger = logging.getLogger("titan_moe")


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
