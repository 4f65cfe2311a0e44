"""The kernels that `perf.kernels = "auto"` means on a GPU: `check` and `plan` count with them, `train` uses them."""

from dataclasses import asdict, replace
from typing import Any

from titan_moe.config.clones import resolve_clones
from titan_moe.config.perf import PerfConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules import check_rules
from titan_moe.config.schema import in_toml
from titan_moe.plan.choice.hardware import Capability, Hardware

FUSED_WINS: dict[Capability, str] = {(9, 0): "H100, H200"}
"""Compute capability -> GPUs on which each fused Triton kernel was measured to be faster, in bf16."""
PREFERENCES: list[dict[str, Any]] = [
    {"kernels": "fused"},
    {"kernels": "fused", "experts": "grouped_mm"},
    {"kernels": "fused", "gradients": "torch"},
    {"kernels": "fused", "experts": "grouped_mm", "gradients": "torch"},
    {"kernels": "grouped_mm"},
    {"kernels": "grouped_mm", "experts": "fused"},  # which overlap by tiles and native formats need
]
"""`perf.kernels` and overrides; the first ones that break no rule of the recipe are taken."""


def resolve_kernels(recipe: Recipe, world_size: int, capability: Capability | None) -> PerfConfig:
    """Replace "auto" by the kernels for GPUs of a compute capability, or for another device (None)."""
    if recipe.perf.kernels != "auto":
        return recipe.perf
    wins = capability in FUSED_WINS and recipe.precision.compute == "bf16"
    in_torch = dict.fromkeys(recipe.model.unmet_needs_of_triton, "torch")
    fused = [_set(recipe.perf, **choice, **in_torch) for choice in PREFERENCES if wins and _is_fused(choice)]
    allowed = fused + [_set(recipe.perf, **choice) for choice in PREFERENCES if not _is_fused(choice)]
    can_run = (perf for perf in allowed if not check_rules(replace(recipe, perf=perf), world_size))
    return next(can_run, _set(recipe.perf, "grouped_mm"))


def as_run_on(recipe: Recipe, world_size: int, hardware: Hardware | None) -> Recipe:
    """The recipe as a run on a card, by default a Hopper GPU, takes it: with its kernels, and without clones where they
    have no room. Where these are the fused ones, "auto" may stay: the plan reads it so, but for adapters of experts."""
    capability = next(iter(FUSED_WINS)) if hardware is None else hardware.capability
    is_read = capability in FUSED_WINS and not recipe.model.adapter.has("experts")
    if recipe.perf.kernels == "auto" and recipe.run.device != "cpu" and not is_read:
        recipe = replace(recipe, perf=resolve_kernels(recipe, world_size, capability))
    return resolve_clones(recipe, world_size)


def _is_fused(choice: dict[str, Any]) -> bool:
    return choice["kernels"] == "fused"


def _set(perf: PerfConfig, kernels: Any, **backends: Any) -> PerfConfig:
    """Set kernels, and what the recipe itself does not override."""
    free = {name: backend for name, backend in backends.items() if getattr(perf.override, name) == "no"}
    return replace(perf, kernels=kernels, override=replace(perf.override, **free))


def describe_kernels(perf: PerfConfig) -> str:
    """Describe kernels in a line: `"fused" with experts "grouped_mm"`."""
    overrides = [f"{name} {in_toml(value)}" for name, value in asdict(perf.override).items() if value != "no"]
    return in_toml(perf.kernels) + (f" with {', '.join(overrides)}" if overrides else "")
