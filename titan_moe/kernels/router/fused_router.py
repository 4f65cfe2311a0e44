"""The router in Triton: one pass over the logits forward, one backward.

B batch · N sequence · E experts · K experts a token

Physics and reference are in routing.py. Saved for backward are the logits and the selected experts, 4·B·N·E + 8·B·N·K
bytes. The host reads nothing from the device, and no sum depends on the order in which programs run.
"""

from typing import Any

import torch
from torch import Tensor

from titan_moe.kernels.device import refuse_cpu
from titan_moe.kernels.registry import Kernel, register
from titan_moe.kernels.router.backward import route_backward
from titan_moe.kernels.router.forward import empty_routing, route_forward
from titan_moe.kernels.router.routing import Routing, RoutingRule, route_tokens_reference


@torch.library.custom_op("titan_moe::route_tokens", mutates_args=())
def _route_tokens(
    logits_BNE: Tensor, expert_bias_E: Tensor, forced_ids_BNK: Tensor | None, kept_ids_BNK: Tensor | None,
    score_fn: str, top_k: int, num_groups: int, top_k_groups: int, group_score: str, normalize_topk: bool,
    route_scale: float, counts_by_score: bool, sparsemixer_jitter: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    refuse_cpu(logits_BNE, "router", "triton")
    rule = RoutingRule(
        score_fn,
        top_k,
        num_groups,
        top_k_groups,
        group_score,
        normalize_topk,
        route_scale,
        counts_by_score,
        sparsemixer_jitter,
    )
    return tuple(route_forward(logits_BNE, expert_bias_E, rule, forced_ids_BNK, kept_ids_BNK))


_route_tokens.register_fake(lambda logits, *rest: tuple(empty_routing(logits, RoutingRule(*rest[3:]))))
_backward_op = torch.library.custom_op("titan_moe::route_tokens_backward", route_backward, mutates_args=())
_backward_op.register_fake(lambda logits_BNE, *_: torch.empty_like(logits_BNE))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    routing = Routing(*output)
    ctx.save_for_backward(inputs[0], routing.topk_ids_BNK)
    ctx.rule = RoutingRule(*inputs[4:])
    ctx.mark_non_differentiable(routing.topk_ids_BNK, routing.counts_BE, routing.aux_counts_BE)
    ctx.set_materialize_grads(False)  # a missing gradient stays None, and nothing is computed for it


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    logits_BNE, ids_BNK = ctx.saved_tensors
    dtopk, _, _, _, dshares, dz = (None if grad is None else grad.contiguous() for grad in grads)
    if dtopk is None:
        dtopk = logits_BNE.new_zeros(ids_BNK.shape)
    rule = ctx.rule
    of_scores = (rule.score_fn, rule.top_k, rule.normalize_topk, rule.route_scale)
    return _backward_op(logits_BNE, ids_BNK, dtopk, dshares, dz, *of_scores), *[None] * (3 + len(rule))


_route_tokens.register_autograd(_backward, setup_context=_save)


def route_tokens(
    logits_BNE: Tensor,
    expert_bias_E: Tensor,
    rule: RoutingRule,
    forced_ids_BNK: Tensor | None = None,
    kept_ids_BNK: Tensor | None = None,
) -> Routing:
    """Route fp32 logits in Triton, on a GPU (or in the interpreter); arguments as in `route_tokens_reference`.

    Raises: TypeError for logits of another dtype, which the kernels would read as fp32.
    """
    if logits_BNE.dtype != torch.float32:
        raise TypeError(
            f'the Triton router takes fp32 logits, got {logits_BNE.dtype}; take perf.override.router = "torch"'
        )
    if forced_ids_BNK is not None:
        forced_ids_BNK, rule = forced_ids_BNK.long().contiguous(), rule._replace(counts_by_score=False)
    if kept_ids_BNK is not None:
        kept_ids_BNK = kept_ids_BNK.int().contiguous()
    # the kernels index rows as contiguous
    bias_E = expert_bias_E.float().contiguous()
    topk_scores_BNK, topk_ids_BNK, counts_BE, aux_counts_BE, share_sums_BE, z_sum = _route_tokens(
        logits_BNE.contiguous(), bias_E, forced_ids_BNK, kept_ids_BNK, *rule
    )
    if not rule.counts_by_score:
        aux_counts_BE = counts_BE  # an operation may not return one tensor twice
    return Routing(topk_scores_BNK, topk_ids_BNK, counts_BE, aux_counts_BE, share_sums_BE, z_sum)


register(Kernel("route_tokens", route_tokens, route_tokens_reference, needs_triton=True))
