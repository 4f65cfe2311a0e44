"""Causal grouped-query attention (arXiv:2305.13245), and the parts shared with MLA.

B batch · N sequence · H heads · D model width
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.model import ModelConfig
from titan_moe.layers.mask import Mask
from titan_moe.layers.qk_norm_rope import QKNormRope

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_backend(name: str) -> AbstractContextManager[None]:
    """Prefer one backend of scaled dot product attention, with the rest as fallback; "auto": PyTorch's choice.

    With "flex", attention with a mask uses FlexAttention and plain causal attention prefers cuDNN.
    """
    if name == "auto":
        return nullcontext()
    preferred = BACKENDS["cudnn" if name == "flex" else name]
    return sdpa_kernel([preferred, *(b for b in BACKENDS.values() if b != preferred)], set_priority=True)


class Context(NamedTuple):
    """RoPE tables and mask of a forward pass; blocks with equal windows share one."""

    cos_NR: Tensor  # fp32
    sin_NR: Tensor  # fp32
    mask: Mask  # None: plain causal


def causal_attention(q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, context: Context, scale: float) -> Tensor:
    """Causal scaled dot product attention, restricted by the context's mask if it has one.

    Shapes: q [B, N, H, Dqk], k [B, N, Hkv, Dqk], v [B, N, Hkv, Dv], Hkv divides H -> [B, N, H, Dv]. With a mask, the
    queries may be fewer than the keys.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BNHD, k_BNHD, v_BNHD))
    is_grouped = q.shape[1] != k.shape[1]
    mask = context.mask
    if isinstance(mask, BlockMask):
        attend = _compiled_flex() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
        out = attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=is_grouped)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
        )
    return out.transpose(1, 2)


def keys_of_own_tokens(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The default of `gather_keys` of attention layers: a rank has whole sequences, or all tokens of some heads."""
    return first, second


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention for eager code: uncompiled, it would hold all N x N scores."""
    return torch.compile(flex_attention, fullgraph=True)


class GroupedQueryAttention(nn.Module):
    """Attention whose query heads share key/value heads; optional query and key norms (Qwen3, OLMoE).

    Where a rank has queries of some tokens, `gather_keys` takes keys and values to those of whole sequences before they
    attend, or `attend` is another attention than that of one rank.
    """

    residual_ends = ("out.weight",)
    parts = {"forward": ("qkv", "qk_norm_rope", "core"), "core": ("out",)}

    def __init__(self, config: ModelConfig, kernels: Kernels = DEFAULT_KERNELS) -> None:
        super().__init__()
        a = config.attention
        self.head_dim, self.scale = a.head_dim, a.head_dim**-0.5
        self.qkv = nn.Linear(config.hidden_size, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim, bias=a.qkv_bias)
        self.qk_norm_rope = QKNormRope(a, config.norm_eps, kernels.rotary)
        self.out = nn.Linear(a.num_heads * a.head_dim, config.hidden_size, bias=a.out_bias)
        self.gather_keys: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = keys_of_own_tokens
        self.attend: Callable[[Tensor, Tensor, Tensor, Context, float], Tensor] = causal_attention
        self.fused_rows = {"qkv.weight": tuple(n * a.head_dim for n in (a.num_heads, a.num_kv_heads, a.num_kv_heads))}

    def forward(self, x_BND: Tensor, context: Context) -> Tensor:
        """[B, N, D] -> [B, N, D]."""
        q_BNHD, k_BNHD, v_BNHD = self.qk_norm_rope(self.qkv(x_BND), context.cos_NR, context.sin_NR)
        k_BNHD, v_BNHD = self.gather_keys(k_BNHD, v_BNHD)
        return self.core(q_BNHD, k_BNHD, v_BNHD, context)

    def core(self, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, context: Context) -> Tensor:
        """Attention itself and the output projection: -> [B, N, D]."""
        return self.out(self.attend(q_BNHD, k_BNHD, v_BNHD, context, self.scale).flatten(2))
