"""The adapter of a checkpoint as PEFT's files."""

from pathlib import Path

from titan_moe.adapters import low_rank
from titan_moe.checkpoint import hf_convert, hf_export
from titan_moe.config import Recipe
from titan_moe.config.model import ModelConfig
from titan_moe.config.perf import PerfConfig
from titan_moe.parameters import Factors, factors_of
from titan_moe.training.build import build_on_meta

Shapes = dict[str, tuple[int, ...]]


def shapes_and_factors(model: ModelConfig) -> tuple[Shapes, dict[str, Factors]]:
    """The shapes of all tensors of a model, which is built without memory, and the adapters of its weights."""
    built = build_on_meta(Recipe(model=model, perf=PerfConfig(kernels="reference")))  # which has no rules for widths
    low_rank.apply(built, model.adapter)
    return {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}, factors_of(built)


def export_adapter(checkpoint: Path, folder: Path, *, is_fused: bool = False, is_ema: bool = False) -> None:
    """Write the adapter of a checkpoint, or with `is_ema` its average, in this process alone.

    Raises: HuggingFaceError for a checkpoint or a form that there is not. Then nothing is left behind.
    """
    model = hf_convert.model_of(checkpoint)
    shapes, factors = shapes_and_factors(model)
    with hf_export.converting(folder):
        hf_convert.export_adapter(model, shapes, checkpoint, folder, factors, is_fused=is_fused, is_ema=is_ema)
