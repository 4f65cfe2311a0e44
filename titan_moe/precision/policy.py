"""Give the modules of a built model the formats that a recipe resolves to (plan/choice/formats.py).

Runs before anything is sharded or compiled. Parameters keep their names, shapes and dtypes: a checkpoint loads into
any precision.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from titan_moe.config.formats import GemmFormats
from titan_moe.kernels.device import compute_capability
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.mlp import SwiGLUDown
from titan_moe.plan.choice.formats import resolve_backend
from titan_moe.plan.resolved import Resolved
from titan_moe.precision.experts import convert_experts
from titan_moe.precision.linears import convert_linear

logger = logging.getLogger("titan_moe")

CONVERTIBLE = (nn.Linear, SwiGLUDown)
"""Exactly these: a subclass of one's own has a forward that must not be replaced."""


def convert(model: nn.Module, resolved: Resolved, device: torch.device) -> dict[str, GemmFormats]:
    """Convert experts and dense linear layers in place, and return the formats of the converted ones by name.

    Modules of a model class of one's own that have other names or classes stay as they are; the log says so.

    Raises: RecipeError if the device has no matrix units for a format, or a package is missing.
    """
    recipe, formats_of = resolved.recipe, resolved.formats
    if not formats_of:
        return {}
    backend = resolve_backend(recipe.precision, compute_capability(device))
    in_triton = device.type == "cuda" and recipe.perf.kernels != "reference"
    modules = dict(model.named_modules())
    converted: dict[str, GemmFormats] = {}
    for name, formats in formats_of.items():
        module = modules.get(name)
        if isinstance(module, GroupedExperts):
            moe = recipe.model.moe
            options: Any = {"weighs_input": moe.score_on == "input", "activation": moe.swiglu}
            convert_experts(module, formats, backend, **options, in_triton=in_triton)
        elif type(module) in CONVERTIBLE:
            model.set_submodule(name, convert_linear(module, formats, backend, in_triton=in_triton))
        else:
            continue
        converted[name] = formats
    _log_rest(model, formats_of.keys() - converted.keys())
    return converted


def _log_rest(model: nn.Module, missing: Iterable[str]) -> None:
    """Name what the policy lists and the model does not have: a model class of one's own."""
    if names := sorted(missing):
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        logger.warning("precision: %s has no such layer or one of its own class: %s", type(model).__name__, shown)
