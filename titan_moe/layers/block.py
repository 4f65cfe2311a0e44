"""One transformer block, as pieces.

B batch · N sequence · D model width
"""

from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.model import ModelConfig
from titan_moe.config.rules.layers import check_attention
from titan_moe.layers.attention import Context, GroupedQueryAttention
from titan_moe.layers.mla import MultiHeadLatentAttention
from titan_moe.layers.mlp import MLP
from titan_moe.layers.moe import MoE
from titan_moe.layers.norm import NORMS

ATTENTIONS: dict[str, type[GroupedQueryAttention | MultiHeadLatentAttention]] = {
    "gqa": GroupedQueryAttention,
    "mla": MultiHeadLatentAttention,
}


class Block(nn.Module):
    """Pre-norm attention and feed-forward with residuals; the feed-forward is dense or a mixture of experts.

    `front` is everything before the feed-forward layer, `back` what is behind it. `parts` of a layer are the methods
    that its own ones call. A norm on results that the model lacks is None.
    """

    parts = {
        "front": ("attention_norm", "attention", "attention_post_norm", "ffn_norm"),
        "forward": ("front", "feed_forward", "ffn_post_norm"),
    }

    def __init__(
        self,
        config: ModelConfig,
        *,
        is_dense: bool,
        kernels: Kernels = DEFAULT_KERNELS,
        routes_by_token: bool = False,
    ) -> None:
        super().__init__()
        check_attention(config, kernels)
        norms_all, after_moe = config.norm_placement == "both", config.norm_placement == "after_moe"

        def norm() -> nn.Module:
            return NORMS[config.norm](config.hidden_size, config.norm_eps)

        self.attention_norm, self.attention_post_norm = norm(), norm() if norms_all else None
        self.attention = ATTENTIONS[config.attention.kind](config, kernels)
        self.ffn_norm = norm()
        self.residual_multiplier = config.residual_multiplier
        self.feed_forward: MLP | MoE
        if is_dense:
            self.feed_forward = MLP(config.hidden_size, config.ffn_hidden_size, kernels)
        else:
            self.feed_forward = MoE(config, kernels=kernels, routes_by_token=routes_by_token)
        self.ffn_post_norm = norm() if norms_all or (after_moe and not is_dense) else None

    def front(self, x_BND: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Attention and both norms: -> residual stream and input of the feed-forward layer, both [B, N, D]."""
        h_BND = self.add(x_BND, self.attention(self.attention_norm(x_BND), context), self.attention_post_norm)
        return h_BND, self.ffn_norm(h_BND)

    def forward(self, x_BND: Tensor, context: Context) -> Tensor:
        """[B, N, D] -> [B, N, D]."""
        h_BND, normed_BND = self.front(x_BND, context)
        return self.back(h_BND, self.feed_forward(normed_BND, *context.of_experts))

    def back(self, h_BND: Tensor, branch_BND: Tensor) -> Tensor:
        """Add the output of the feed-forward layer to the residual stream."""
        return self.add(h_BND, branch_BND, self.ffn_post_norm)

    def add(self, x_BND: Tensor, branch_BND: Tensor, post_norm: nn.Module | None) -> Tensor:
        """Add the output of a layer, normed or not, to the residual stream."""
        if post_norm is not None:
            branch_BND = post_norm(branch_BND)
        if self.residual_multiplier == 1.0:
            return x_BND + branch_BND
        return torch.add(x_BND, branch_BND, alpha=self.residual_multiplier)


def keeps_context(block: nn.Module) -> bool:
    """Whether a block attends as ours do, to the keys and values of its context's cache too."""
    if not isinstance(block, Block) or type(block).front is not Block.front:
        return False
    own: Any = type(block.attention)
    return any(own.forward is ours.forward and own.core is ours.core for ours in ATTENTIONS.values())
