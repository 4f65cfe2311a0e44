"""Query and key norm and RoPE, between the fused projection of attention and its softmax.

B batch · N sequence · H query heads · Hkv key/value heads · D head width · X = (H + 2·Hkv)·D
"""

import torch
from torch import Tensor, nn

from titan_moe.config.kernels import Backend
from titan_moe.config.model import AttentionConfig
from titan_moe.kernels.choose import NORM_AND_ROTATE
from titan_moe.parameters import ParameterKind


class QKNormRope(nn.Module):
    """Split a projection into queries, keys and values; norm queries and keys per head (Qwen3) and rotate them (RoPE).

    One module because it is one operation; it owns the weights of both norms (none without `qk_norm`). The width of the
    projection gives the number of heads: a tensor-parallel rank has fewer.
    """

    parameter_kinds = {"q_norm_weight": ParameterKind.SCALE, "k_norm_weight": ParameterKind.SCALE}

    def __init__(self, config: AttentionConfig, eps: float, backend: Backend = "torch") -> None:
        super().__init__()
        self.norm_and_rotate = NORM_AND_ROTATE[backend]
        self.eps, self.is_interleaved = eps, config.rope_is_interleaved
        self.heads_per_group = config.num_heads // config.num_kv_heads + 2  # query heads of a key head, key, value
        for name in ("q_norm_weight", "k_norm_weight"):
            self.register_parameter(name, nn.Parameter(torch.ones(config.head_dim)) if config.qk_norm else None)

    def extra_repr(self) -> str:
        return f"norm={self.q_norm_weight is not None}, interleaved={self.is_interleaved}"

    def forward(self, qkv_BNX: Tensor, cos_NR: Tensor, sin_NR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, N, X], tables [N, D/2] -> q [B, N, H, D], k and v [B, N, Hkv, D]."""
        num_kv_heads = qkv_BNX.shape[-1] // (self.heads_per_group * 2 * cos_NR.shape[1])
        weights = self.q_norm_weight, self.k_norm_weight
        return self.norm_and_rotate(qkv_BNX, *weights, cos_NR, sin_NR, num_kv_heads, self.eps, self.is_interleaved)
