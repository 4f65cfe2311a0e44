"""Map a recipe's choice of kernels to their implementations. Nothing else chooses implementations.

Each table maps the values of a field of `config.kernels.Kernels` to functions of one signature.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.attention.max_logits import MaxLogits, max_logits, max_logits_reference
from titan_moe.kernels.delayed_weight_grads import WeightGradQueue
from titan_moe.kernels.experts.composite_mlp import CompositeMLP, ExpertMLP
from titan_moe.kernels.experts.fused_mlp import FusedMLP, biased_expert_mlp, fused_expert_mlp, with_activation
from titan_moe.kernels.experts.grouped_mm import GROUPED_GEMM, GroupedGemm, QueuedGroupedMM
from titan_moe.kernels.experts.swiglu_down import (
    SwiGLUDown,
    fused_swiglu_down,
    queued_swiglu_down,
    queued_swiglu_down_reference,
    swiglu_down_reference,
)
from titan_moe.kernels.loss.cross_entropy import CrossEntropy, linear_cross_entropy
from titan_moe.kernels.loss.fused_cross_entropy import fused_cross_entropy
from titan_moe.kernels.optim.accumulate import Accumulate, accumulate, accumulate_reference
from titan_moe.kernels.permute.counting_sort import counting_sort
from titan_moe.kernels.permute.permutation import Permute, sort_by_expert
from titan_moe.kernels.rope.latent_heads import latent_heads, latent_heads_reference
from titan_moe.kernels.rope.norm_and_rotate import norm_and_rotate, norm_and_rotate_reference
from titan_moe.kernels.router.fused_router import route_tokens
from titan_moe.kernels.router.logits import RouterLogits, router_logits, router_logits_reference
from titan_moe.kernels.router.routing import RouteTokens, route_tokens_reference

PERMUTE: dict[str, Permute] = {"torch": sort_by_expert, "triton": counting_sort}
ROUTER_LOGITS: dict[str, RouterLogits] = {"torch": router_logits_reference, "triton": router_logits}
ROUTE_TOKENS: dict[str, RouteTokens] = {"torch": route_tokens_reference, "triton": route_tokens}
MAX_LOGITS: dict[str, MaxLogits] = {"torch": max_logits_reference, "triton": max_logits}
LATENT_HEADS = {"torch": latent_heads_reference, "triton": latent_heads}
NORM_AND_ROTATE = {"torch": norm_and_rotate_reference, "triton": norm_and_rotate}
CROSS_ENTROPY: dict[str, CrossEntropy] = {"torch": linear_cross_entropy, "triton": fused_cross_entropy}
ACCUMULATE: dict[str, Accumulate] = {"torch": accumulate_reference, "triton": accumulate}
SWIGLU_DOWN: dict[str, SwiGLUDown] = {
    "grouped_mm": swiglu_down_reference,
    "reference": swiglu_down_reference,
    "fused": fused_swiglu_down,
}
QUEUED_SWIGLU_DOWN: dict[SwiGLUDown, Callable[[WeightGradQueue], SwiGLUDown]] = {
    swiglu_down_reference: queued_swiglu_down_reference,
    fused_swiglu_down: queued_swiglu_down,
}
"""The same operations with weight gradients that a queue delays."""
QUEUED_GROUPED_GEMM: dict[str, Callable[[WeightGradQueue], GroupedGemm]] = {
    kind: partial(QueuedGroupedMM, kind=kind) for kind in GROUPED_GEMM
}
"""The same with weight gradients that a queue delays."""


def choose_expert_mlp(
    choice: str, score_on: str, has_bias: bool = False, activation: SwiGLU = PLAIN_SWIGLU
) -> ExpertMLP:
    """The MLP for the recipe's choice of expert kernels, and what `[model.moe]` says of experts.

    Raises: ValueError for `fused` with scores on the input, because it gathers rows inside a GEMM, where no score is
        applied.
    """
    if choice != "fused":
        return _composite(choice, score_on == "input", activation)
    if score_on == "input":
        raise ValueError('perf.kernels = "fused" needs model.moe.score_on = "activation"; or take "grouped_mm"')
    return with_activation(biased_expert_mlp if has_bias else fused_expert_mlp, activation)


@cache
def _composite(choice: str, weighs_input: bool, activation: SwiGLU) -> ExpertMLP:
    return CompositeMLP(GROUPED_GEMM[choice], weighs_input, activation)


def choose_queued_expert_mlp(mlp: ExpertMLP, queue: WeightGradQueue) -> ExpertMLP | None:
    """The same MLP with weight gradients that the queue delays; None if it has none of its own: emulated formats."""
    if isinstance(mlp, FusedMLP):
        return replace(mlp, queue=queue)
    for choice, gemm in GROUPED_GEMM.items():
        if isinstance(mlp, CompositeMLP) and mlp.gemm == gemm:
            return replace(mlp, gemm=QUEUED_GROUPED_GEMM[choice](queue))
    return None
