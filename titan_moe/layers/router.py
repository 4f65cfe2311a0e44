"""Which experts a token visits, and with what weight.

B batch · N sequence · D width · E experts · K choices a token · G groups
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.layers.balance import LoadBalance

Choose = Callable[[Tensor], Tensor]
"""Scores (bias added) [B, N, E] -> chosen experts [B, N, K]."""


class TopK:
    """Choose the K best experts."""

    def __init__(self, config: MoEConfig) -> None:
        self.top_k = config.top_k

    def __call__(self, scores_BNE: Tensor) -> Tensor:
        return scores_BNE.topk(self.top_k, dim=-1, sorted=False).indices


class GroupLimitedTopK:
    """Choose the K best experts out of the best groups (DeepSeek, arXiv:2405.04434 and arXiv:2412.19437)."""

    def __init__(self, config: MoEConfig) -> None:
        self.top_k, self.num_groups, self.top_k_groups = config.top_k, config.num_groups, config.top_k_groups
        self.num_ranked = {"max": 1, "top2_sum": 2}[config.group_score]

    def __call__(self, scores_BNE: Tensor) -> Tensor:
        grouped = scores_BNE.unflatten(-1, (self.num_groups, -1))
        group_scores_BNG = grouped.topk(min(self.num_ranked, grouped.shape[-1]), dim=-1).values.sum(-1)
        chosen = group_scores_BNG.topk(self.top_k_groups, dim=-1, sorted=False).indices
        is_open_BNG = torch.zeros_like(group_scores_BNG, dtype=torch.bool).scatter_(-1, chosen, True)
        open_scores = grouped.masked_fill(~is_open_BNG[..., None], float("-inf")).flatten(-2)
        return open_scores.topk(self.top_k, dim=-1, sorted=False).indices


class ForcedBalance:
    """Benchmarks only: deal experts out evenly, in a fixed random order, whatever the scores say.

    Token t takes K neighbours of a shuffled ring of experts, so every E tokens load each expert with K, and a token's
    experts lie on as many ranks as randomly chosen ones would.
    """

    def __init__(self, config: MoEConfig, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ring_E = torch.randperm(config.num_experts, generator=generator).to(device)
        self.top_k = config.top_k

    def __call__(self, scores_BNE: Tensor) -> Tensor:
        num_sequences, num_tokens, num_experts = scores_BNE.shape
        places = torch.arange(num_sequences * num_tokens * self.top_k, device=scores_BNE.device) % num_experts
        return self.ring_E[places].view(num_sequences, num_tokens, self.top_k)


class TopKRouter(nn.Module):
    """Scores every expert for every token in fp32 and keeps the best K.

    The bias of auxiliary-loss-free balancing (arXiv:2408.15664) takes part in the choice only, never in the weight; it
    is a buffer that the optimizer step moves, and stays zero where it is not used.
    """

    expert_bias_E: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size))
        self.register_buffer("expert_bias_E", torch.zeros(moe.num_experts, dtype=torch.float32))
        self.score = {"softmax": _softmax, "sigmoid": torch.sigmoid}[moe.score_fn]
        self.choose: Choose = GroupLimitedTopK(moe) if moe.num_groups > 1 else TopK(moe)
        self.normalize_topk, self.route_scale = moe.normalize_topk, moe.route_scale
        self.balance = LoadBalance(moe)

    def reset_buffers(self) -> None:
        """Start without a preference."""
        self.expert_bias_E.zero_()

    def forward(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, D] -> scores fp32 [B·N, K] and expert ids [B·N, K]."""
        wide = torch.promote_types(x_BND.dtype, torch.float32)
        logits_BNE = F.linear(x_BND.to(wide), self.weight.to(wide))
        scores_BNE = self.score(logits_BNE)
        topk_ids_BNK = self.choose(scores_BNE.detach() + self.expert_bias_E)
        topk_scores_BNK = scores_BNE.gather(-1, topk_ids_BNK)
        if self.normalize_topk:
            topk_scores_BNK = topk_scores_BNK / (topk_scores_BNK.sum(-1, keepdim=True) + 1e-20)
        topk_scores_BNK = self.balance(topk_scores_BNK * self.route_scale, topk_ids_BNK, scores_BNE, logits_BNE)
        return topk_scores_BNK.flatten(0, 1), topk_ids_BNK.flatten(0, 1)


def _softmax(logits_BNE: Tensor) -> Tensor:
    return logits_BNE.softmax(dim=-1)
