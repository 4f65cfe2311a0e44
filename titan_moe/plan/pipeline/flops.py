"""FLOPs of a pipeline's modules and stages, from which their times are estimated.

Two FLOPs a multiply-add. The backward of a matrix multiplication has a GEMM for the gradient of its input and one for
that of its weight; attention without its projections has no weights. What is recomputed is left out, and so is the
embedding.
"""

from collections.abc import Iterable
from typing import NamedTuple

from titan_moe.config.recipe import Recipe
from titan_moe.plan.count import attention_core_flops_of_layer, layer_matrix_weights


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
    model = recipe.model
    core = 0
    if name == "head":
        weights = model.vocab_size * model.hidden_size
    elif name.startswith("layers."):
        layer = int(name.removeprefix("layers."))
        weights = layer_matrix_weights(model, layer)
        core = attention_core_flops_of_layer(model, layer, recipe.train.seq_len_tokens) // 3
    else:
        return Flops()
    return Flops(2 * weights + core, 2 * weights + 2 * core, 2 * weights)


def flops_of_stage(recipe: Recipe, stage: Iterable[str]) -> Flops:
    """The FLOPs of all modules of a stage."""
    parts = [Flops(), *(flops_of_module(recipe, name) for name in stage)]
    return Flops(*(sum(column) for column in zip(*parts, strict=True)))
