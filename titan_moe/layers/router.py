"""The router: the experts of each token and their weights.

B batch · N sequence · D width · E experts · K choices a token
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.model import ModelConfig
from titan_moe.kernels.choose import ROUTE_TOKENS, ROUTER_LOGITS
from titan_moe.kernels.router.routing import RoutingRule
from titan_moe.layers.balance import LoadBalance
from titan_moe.parameters import ParameterKind


class TopKRouter(nn.Module):
    """Score every expert for every token in fp32 and keep the top K.

    The bias of auxiliary-loss-free balancing (arXiv:2408.15664) affects the selection only, never the weights. It is a
    buffer that the optimizer step updates, zero if unused. `force` maps logits to experts that replace the selection,
    int64 [B, N, K], or to None (forced_routing.py).
    """

    parameter_kinds = {"weight": ParameterKind.ROUTER}
    expert_bias_E: Tensor

    def __init__(self, config: ModelConfig, kernels: Kernels = DEFAULT_KERNELS) -> None:
        super().__init__()
        moe = config.moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size))
        self.register_buffer("expert_bias_E", torch.zeros(moe.num_experts, dtype=torch.float32))
        self.rule = RoutingRule(
            moe.score_fn,
            moe.top_k,
            moe.num_groups,
            moe.top_k_groups,
            moe.group_score,
            moe.normalize_topk,
            moe.route_scale,
            moe.counts_by_score,
        )
        self.logits = ROUTER_LOGITS[kernels.router]
        self.route = ROUTE_TOKENS[kernels.router]
        self.force: Callable[[Tensor], Tensor | None] = _no_forced_routing
        self.balance = LoadBalance(moe)
        self.bias_update_speed = moe.bias_update_speed

    def reset_buffers(self) -> None:
        """Zero the expert bias."""
        self.expert_bias_E.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TopKRouter":
        """Convert or move the module, but keep the expert bias in fp32: steps of 1e-3 are lost in bf16."""
        bias_E = self.expert_bias_E
        super()._apply(fn, recurse)
        if self.expert_bias_E.dtype.itemsize < bias_E.dtype.itemsize:
            self.expert_bias_E = bias_E.to(self.expert_bias_E.device)
        return self

    def forward(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, D] -> scores fp32 [B·N, K] and expert ids [B·N, K]."""
        logits_BNE = self.logits(x_BND, self.weight)
        routing = self.route(logits_BNE, self.expert_bias_E, self.rule, self.force(logits_BNE))
        return self.balance(routing).flatten(0, 1), routing.topk_ids_BNK.flatten(0, 1)


def _no_forced_routing(logits_BNE: Tensor) -> None:
    """The default of `TopKRouter.force`."""
