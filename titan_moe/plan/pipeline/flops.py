"""FLOPs of a pipeline's modules and stages, from which their times are estimated.

Two FLOPs a multiply-add. The backward of a matrix multiplication has a GEMM for the gradient of its input and one for
that of its weight, where these train; attention without its projections has no weights. What is recomputed is left
out, and so is the embedding.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from titan_moe.config.model import ModelConfig
from titan_moe.config.modules import modules_of
from titan_moe.config.recipe import Recipe
from titan_moe.config.trainable import Patterns, trains_all
from titan_moe.plan.cost.count import attention_core_flops_per_token, flops_of_layer


class Flops(NamedTuple):
    """FLOPs of a token."""

    forward: float = 0
    backward_input: float = 0
    backward_weight: float = 0

    @property
    def total(self) -> float:
        """Forward and backward."""
        return sum(self)


def flops_of_module(recipe: Recipe, name: str) -> Flops:
    """The FLOPs of a module that stages have: "embed", "layers.0", "norm", "head"."""
    return flops_of(recipe.model, recipe.train.seq_len_tokens, name, recipe.optim.trainable)


@lru_cache(maxsize=2048)  # a report asks for them many times
def flops_of(model: ModelConfig, seq_len_tokens: int, name: str, patterns: Patterns = ()) -> Flops:
    """The same, of a model alone."""
    if not trains_all(model, patterns):
        is_block = name.startswith("layers.")
        layer = int(name.removeprefix("layers.")) if is_block else None
        return Flops(*flops_of_layer(model, seq_len_tokens, layer, patterns, "" if is_block else name))
    layers = [int(name.removeprefix("layers."))] if name.startswith("layers.") else []
    core = attention_core_flops_per_token(model, seq_len_tokens, layers) // 3
    rows = [row for row in modules_of(model) if row.path == name or any(map(row.is_in, layers))]
    weights = sum(row.multiply_adds for row in rows if row.region != "router")
    return Flops(2 * weights + core, 2 * weights + 2 * core, 2 * weights)


def flops_of_stage(recipe: Recipe, stage: Iterable[str]) -> Flops:
    """The FLOPs of all modules of a stage."""
    parts = [Flops(), *(flops_of_module(recipe, name) for name in stage)]
    return Flops(*(sum(column) for column in zip(*parts, strict=True)))
