"""Query and key norms and RoPE, between the fused projection of attention and its softmax.

B batch · N sequence · H query heads · Hkv key/value heads · D head width · P rotated pairs · X = (H + 2·Hkv)·D
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.config.attention import AttentionConfig
from titan_moe.config.kernels import Backend
from titan_moe.kernels.choose import NORM_AND_ROTATE
from titan_moe.layers.rope import scaled
from titan_moe.parameters import ParameterKind


class QKNormRope(nn.Module):
    """Split a projection into queries, keys and values; norm queries and keys (Qwen3) and rotate them (RoPE).

    One module because it is one operation; it owns the weights of the norms over heads (none without `qk_norm`). The
    width of the projection gives the number of heads: a tensor-parallel rank has fewer.
    """

    parameter_kinds = {"q_norm_weight": ParameterKind.SCALE, "k_norm_weight": ParameterKind.SCALE}

    def __init__(self, config: AttentionConfig, eps: float, backend: Backend = "torch") -> None:
        super().__init__()
        self.norm_and_rotate = NORM_AND_ROTATE[backend]
        self.eps, self.is_interleaved, self.head_dim = eps, config.rope_is_interleaved, config.head_dim
        self.norms_rotated = config.qk_norm_is_after_rope
        self.norms_unrotated = config.qk_norm_layers == "all"
        self.heads_per_group = config.num_heads // config.num_kv_heads + 2  # query heads of a key head, key, value
        has_weights = config.qk_norm and config.qk_norm_has_weights
        norms_heads, norms_all = (has_weights and config.qk_norm_over == over for over in ("head", "all_heads"))
        self.all_heads = NormAllHeads(config, eps) if norms_all or config.clip_qkv else None
        for name in ("q_norm_weight", "k_norm_weight"):
            self.register_parameter(name, nn.Parameter(torch.ones(config.head_dim)) if norms_heads else None)

    def extra_repr(self) -> str:
        return f"norm={self.q_norm_weight is not None}, interleaved={self.is_interleaved}"

    def forward(
        self,
        qkv_BNX: Tensor,
        cos_NP: Tensor,
        sin_NP: Tensor,
        has_rope: bool = True,
        query_factors_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, N, X], tables [N, P] -> q [B, N, H, D], k and v [B, N, Hkv, D].

        Without rotary embedding the tables rotate nothing.
        """
        if self.all_heads is not None:
            qkv_BNX = self.all_heads(qkv_BNX)
        num_kv_heads = qkv_BNX.shape[-1] // (self.heads_per_group * self.head_dim)
        q_weight_D, k_weight_D = self.q_norm_weight, self.k_norm_weight
        first = None if self.norms_rotated else q_weight_D, None if self.norms_rotated else k_weight_D
        q_BNHD, k_BNHD, v_BNHD = self.norm_and_rotate(
            qkv_BNX, *first, cos_NP, sin_NP, num_kv_heads, self.head_dim, self.eps, self.is_interleaved
        )
        if self.norms_rotated and (has_rope or self.norms_unrotated):
            q_BNHD, k_BNHD = self._norm(q_BNHD, q_weight_D), self._norm(k_BNHD, k_weight_D)
        return scaled(q_BNHD, query_factors_N), k_BNHD, v_BNHD

    def _norm(self, x_BNHD: Tensor, weight_D: Tensor | None) -> Tensor:
        # autocast on GPUs norms in fp32, and FlexAttention takes queries, keys and values of one dtype
        return F.rms_norm(x_BNHD, (self.head_dim,), weight_D, self.eps).to(x_BNHD.dtype)


class NormAllHeads(nn.Module):
    """Norm queries over the width of all their heads, and keys (OLMoE), then clamp them and the values.

    `weight` is that of queries, then keys; None where the projection is clamped alone. Where a rank has some heads,
    `average` takes the mean squares of its part to those of all ranks.
    """

    parameter_kinds = {"weight": ParameterKind.SCALE}

    def __init__(self, config: AttentionConfig, eps: float) -> None:
        super().__init__()
        self.eps, self.clip = eps, config.clip_qkv
        self.widths = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        is_normed = config.qk_norm and config.qk_norm_over == "all_heads"
        self.register_parameter("weight", nn.Parameter(torch.ones(sum(self.widths))) if is_normed else None)
        self.average: Callable[[Tensor], Tensor] = of_all_heads

    def forward(self, qkv_BNX: Tensor) -> Tensor:
        """[B, N, X] -> [B, N, X]."""
        if self.weight is not None:
            qkv_BNX = self._norm(qkv_BNX, self.weight)
        return qkv_BNX.clamp(-self.clip, self.clip) if self.clip else qkv_BNX

    def _norm(self, qkv_BNX: Tensor, weight: Tensor) -> Tensor:
        width = qkv_BNX.shape[-1]
        widths = (2 * len(weight) - width, width - len(weight))  # of queries, of keys
        *parts, values_BNX = qkv_BNX.split([*widths, widths[1]], dim=-1)
        wide = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
        mean_squares_BN2 = self.average(torch.stack([x.square().mean(-1) for x in wide], dim=-1))
        rstd_BN2 = torch.rsqrt(mean_squares_BN2 + self.eps)
        factors = zip(wide, rstd_BN2.split(1, dim=-1), weight.split(widths), strict=True)
        normed = [(x * rstd * own).to(qkv_BNX.dtype) for x, rstd, own in factors]
        return torch.cat([*normed, values_BNX], dim=-1)


def of_all_heads(mean_squares_BN2: Tensor) -> Tensor:
    """The default of `average`: a rank has all heads."""
    return mean_squares_BN2
