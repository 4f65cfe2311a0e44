"""Resolve `memory.recompute = "auto"` for this machine, so that the saved recipe contains the choice."""

import logging
from dataclasses import replace

import torch
import torch.distributed as dist

from titan_moe.checkpoint.rank_zero import run_on_rank_zero
from titan_moe.config import Recipe
from titan_moe.config.recompute import with_entries
from titan_moe.kernels.device import device_name
from titan_moe.plan.choice.hardware import Hardware, find_hardware
from titan_moe.plan.choice.recompute import choose_recompute, is_auto

logger = logging.getLogger("titan_moe")
UNKNOWN = "NVIDIA H100"
"""The device whose rates stand for those of one that is not known."""


def resolve_recompute(recipe: Recipe, device: torch.device) -> Recipe:
    """Choose what is computed again by the memory of rank 0's device, equally for all ranks, and log it. On a CPU
    nothing is."""
    if not is_auto(recipe):
        return recipe
    if device.type != "cuda":
        return with_entries(recipe, ())

    def choose() -> tuple[str, ...]:
        choice = choose_recompute(recipe, dist.get_world_size(), hardware_of(device))
        for line in choice.lines():
            logger.log(
                logging.INFO if choice.fits else logging.WARNING,
                "memory.recompute on %s: %s",
                device_name(device),
                line,
            )
        return choice.entries

    return with_entries(recipe, run_on_rank_zero(choose))


def hardware_of(device: torch.device) -> Hardware:
    """What is known of a device, with the memory that it has."""
    gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    if (known := find_hardware(device_name(device))) is not None:
        return replace(known, memory_gib=min(known.memory_gib, gib))  # less of it where a GPU is partitioned
    unknown = find_hardware(UNKNOWN)
    assert unknown is not None
    return replace(unknown, memory_gib=gib)
