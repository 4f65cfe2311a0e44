"""What a rank holds of a layer's experts in backward where FSDP shards them (parallel/fsdp.py).

They are gathered before their backward, while the layer after them computes, and copied to a tensor of the computing
stream. After it the parameters are freed, the gradients are copied to one message in the dtype of the reduction, and
then freed. For the message each gradient is rearranged by ranks, to another tensor; the last one stays beside it.
"""

from typing import NamedTuple

from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.plan.cost.graph_pool import Group
from titan_moe.plan.pipeline.parts import RankPart


class Held(NamedTuple):
    """Bytes beyond those that are counted as gathered."""

    computing: float = 0.0
    """The parameters, beside the temporaries of their backward."""
    ahead: float = 0.0
    """Those of the layer before, which are gathered meanwhile, where no pool of a CUDA graph counts them."""
    reducing: float = 0.0
    """After the backward the gradients and their message, less what is freed."""


def held_bytes(part: RankPart, layer: Group, kept: float, *, has_sums: bool) -> Held:
    """Count them, of a layer's experts, which have `kept` so many bytes for backward. With `has_sums` gradients are
    added to sums, which are counted as gathered."""
    p, precision = part.recipe.parallel, part.recipe.precision
    compute, reduce = BYTES_OF_DTYPE[precision.compute], BYTES_OF_DTYPE[precision.reduce]
    whole, gradients = layer.parameters * compute, layer.trained * (reduce + (0 if has_sums else compute))
    gradients += layer.trained / 3 * (reduce if has_sums else compute) if layer.num_ranks > 1 else 0.0  # of `down`
    if p.accumulate_unsharded or not p.reshard_experts_after_forward:  # there already
        return Held(reducing=max(gradients - whole - kept, 0.0))
    is_ahead = part.recipe.compile.cudagraph == "off" and layer.num_ranks > 1 and part.recipe.model.num_moe_layers > 1
    return Held(whole, is_ahead * whole, max(gradients - kept, 0.0))
