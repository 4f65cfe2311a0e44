"""The router: the experts of each token and their weights.

B batch · N sequence · D width · E experts · K choices a token
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.model import ModelConfig
from titan_moe.kernels.choose import ROUTE_TOKENS, ROUTER_LOGITS
from titan_moe.kernels.router.logits import router_logits_fp64
from titan_moe.kernels.router.masked import mask_tokens
from titan_moe.kernels.router.quantiles import count_margins
from titan_moe.kernels.router.routing import RouteTokens, Routing, RoutingRule, expert_scores
from titan_moe.layers.balance import LoadBalance
from titan_moe.layers.dropping import DroppingRoute
from titan_moe.layers.wide_buffers import WideBuffers
from titan_moe.parameters import ParameterKind


class TopKRouter(WideBuffers):
    """Score every expert for every token in fp32 and keep the top K.

    `bias` is a part of the logits (gpt-oss). `expert_bias_E`, that of auxiliary-loss-free balancing (arXiv:2408.15664),
    affects the selection only, never the weights. It is a buffer that the optimizer step updates, zero if unused.
    `force` maps logits to experts that replace the selection, int64 [B, N, K], or to None (forced_routing.py). The
    logits are those of `noise` of the input (input_noise.py).
    """

    parameter_kinds = {"weight": ParameterKind.ROUTER, "bias": ParameterKind.BIAS}
    wide_buffers = ("expert_bias_E",)  # steps of 1e-3 are lost in bf16
    expert_bias_E: Tensor

    def __init__(self, config: ModelConfig, kernels: Kernels = DEFAULT_KERNELS) -> None:
        super().__init__()
        moe = config.moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size))
        self.register_parameter("bias", nn.Parameter(torch.zeros(moe.num_experts)) if moe.router_bias else None)
        self.register_buffer("expert_bias_E", torch.zeros(moe.num_experts, dtype=torch.float32))
        self.rule = RoutingRule(
            moe.score_fn,
            moe.top_k,
            moe.num_groups,
            moe.top_k_groups,
            moe.group_score,
            moe.normalize_topk,
            moe.route_scale,
            counts_by_score=moe.aux_coefs.are_used,
            sparsemixer_jitter=moe.sparsemixer_jitter,
        )
        self.logits = router_logits_fp64 if moe.router_dtype == "fp64" else ROUTER_LOGITS[kernels.router]
        self.route: RouteTokens = ROUTE_TOKENS[kernels.router]
        if moe.capacity_factor:
            self.route = DroppingRoute(self.route, moe)
        self.force: Callable[[Tensor], Tensor | None] = _no_forced_routing
        self.noise: Callable[[Tensor], Tensor] = _no_noise
        self.balance = LoadBalance(moe)
        self.bias_update_speed, self.bias_ema = moe.bias_update_speed, moe.bias_ema

    def extra_repr(self) -> str:
        num_experts, width = self.weight.shape
        return f"{width} -> {num_experts} experts, top_k={self.rule.top_k}, {self.rule.score_fn}"

    def reset_buffers(self) -> None:
        """Zero the expert bias."""
        self.expert_bias_E.zero_()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if self.weight.is_meta:
            return
        if self.balance.scale.is_meta:  # with assign = True, and it is in no state dict
            self.balance.to_empty(device=self.weight.device)
        if self.expert_bias_E.is_meta:
            self.expert_bias_E = torch.zeros_like(self.expert_bias_E, device=self.weight.device)

    def forward(
        self, x_BND: Tensor, valid_BN: Tensor | None = None, tokens_BN: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[B, N, D] -> scores fp32 [B·N, K] and expert ids [B·N, K], -1 for those that are dropped, and for tokens that
        are not valid: they are in no count and no loss. `tokens_BN` are read where ids of tokens route.

        Raises: ValueError for another shape, and for a mask where tokens are dropped.
        """
        if x_BND.ndim != 3 or x_BND.shape[2] != self.weight.shape[1]:
            raise ValueError(
                f"a MoE layer takes hidden states [B, N, {self.weight.shape[1]}], batch, sequence and width, and got "
                f"{list(x_BND.shape)}; a single sequence of tokens [T, D] is x[None]"
            )
        if valid_BN is not None:
            self._check_mask(x_BND, valid_BN)
        bias = () if self.bias is None else (self.bias,)
        logits_BNE = self.logits(self.noise(x_BND), self.weight, *bias)
        forced_ids_BNK = self.force(logits_BNE)
        if forced_ids_BNK is None:
            forced_ids_BNK = self._given_ids(logits_BNE, tokens_BN)
        routing = self.route(logits_BNE, self.expert_bias_E, self.rule, forced_ids_BNK)
        margins_EQ = self._margins(logits_BNE, valid_BN)
        if valid_BN is not None:
            is_forced = forced_ids_BNK is not None
            routing = mask_tokens(routing, logits_BNE, self.rule, valid_BN, is_forced=is_forced)
        scores_BNK = self.balance(routing, margins_EQ, is_masked=valid_BN is not None)
        scores_BNK = scores_BNK.to(torch.promote_types(x_BND.dtype, torch.float32))
        return scores_BNK.flatten(0, 1), self._sent_ids(routing).flatten(0, 1)

    def _given_ids(self, logits_BNE: Tensor, tokens_BN: Tensor | None) -> Tensor | None:
        """Experts of tokens that are known without scores, int64 [B, N, K]; None: the scores choose."""
        return None

    def _sent_ids(self, routing: Routing) -> Tensor:
        """The experts that tokens are sent to, -1 where an assignment is dropped."""
        return routing.topk_ids_BNK.clamp(min=-1) if self.balance.counts_dropped else routing.topk_ids_BNK

    def _margins(self, logits_BNE: Tensor, valid_BN: Tensor | None) -> Tensor | None:
        """What quantile balancing counts of these tokens."""
        if not self.balance.counts_margins or not torch.is_grad_enabled():
            return None
        logits_BNE = logits_BNE.detach()
        scores_BNE = expert_scores(logits_BNE, self.rule.score_fn)
        return count_margins(scores_BNE, self.expert_bias_E, self.rule.top_k, valid_BN)

    def _check_mask(self, x_BND: Tensor, valid_BN: Tensor) -> None:
        if valid_BN.shape != x_BND.shape[:2] or valid_BN.dtype != torch.bool:
            raise ValueError(
                f"valid_BN is true for tokens and false for padding, bool {list(x_BND.shape[:2])}, and got "
                f"{valid_BN.dtype} {list(valid_BN.shape)}"
            )
        if self.balance.counts_dropped:
            raise ValueError(
                "model.moe.capacity_factor is for all tokens that a rank routes, padding too; set it to 0, or pass no "
                "valid_BN"
            )


def _no_noise(x_BND: Tensor) -> Tensor:
    """The default of `TopKRouter.noise`."""
    return x_BND


def _no_forced_routing(logits_BNE: Tensor) -> None:
    """The default of `TopKRouter.force`."""
