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
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.model import ModelConfig
from titan_moe.kernels.attention.max_logits import ALL_CAUSAL, Pairs
from titan_moe.layers.kv_cache import LayerCache
from titan_moe.layers.mask import Mask
from titan_moe.layers.qk_norm_rope import QKNormRope
from titan_moe.parameters import ParameterKind

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


SINK_COLUMNS = 8
"""That a sink adds to the width of heads: kernels want multiples of it."""


def attention_backend(name: str) -> AbstractContextManager[None]:
    """Prefer one backend of scaled dot product attention, with the rest as fallback; "auto": PyTorch's choice.

    With "flex", attention with a mask uses FlexAttention and plain causal attention prefers cuDNN.
    """
    if name == "auto":
        return nullcontext()
    preferred = BACKENDS["cudnn" if name == "flex" else name]
    return sdpa_kernel([preferred, *(b for b in BACKENDS.values() if b != preferred)], set_priority=True)


class Context(NamedTuple):
    """What blocks read of a forward pass beside hidden states: RoPE tables, mask, ids of tokens. Blocks that attend
    alike share these tensors."""

    cos_NR: Tensor  # fp32
    sin_NR: Tensor  # fp32
    mask: Mask  # None: plain causal
    cache: LayerCache | None = None  # keys and values of earlier tokens
    has_rope: bool = True
    query_factors_N: Tensor | None = None  # fp32; None: one
    tokens_BN: Tensor | None = None  # those that a router of this rank has, where it routes by them
    pairs: Pairs = ALL_CAUSAL  # those of the mask, where the model `describes_pairs`

    @property
    def of_experts(self) -> tuple[Tensor | None, ...]:
        """What a feed-forward layer takes beside hidden states."""
        return () if self.tokens_BN is None else (None, self.tokens_BN)


def causal_attention(
    q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, context: Context, scale: float, sinks_H: Tensor | None = None
) -> Tensor:
    """Causal scaled dot product attention, restricted by the context's mask if it has one.

    Shapes: q [B, N, H, Dqk], k [B, N, Hkv, Dqk], v [B, N, Hkv, Dv], Hkv divides H -> [B, N, H, Dv]. With a mask, the
    queries may be fewer than the keys. A sink is a logit that joins the softmax of its head and has no value. With a
    cache, queries, keys and values are those of new tokens (kv_cache.py).
    """
    if (cache := context.cache) is not None:
        rows = cache.rows_of(q_BNHD), *cache.extend(k_BNHD, v_BNHD)
        attended = causal_attention(*rows, context._replace(cache=None), scale, sinks_H)
        return cache.as_one_sequence(attended, q_BNHD.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q_BNHD, k_BNHD, v_BNHD))
    is_grouped = q.shape[1] != k.shape[1]
    mask = context.mask
    if isinstance(mask, BlockMask):
        attend = _compiled_flex() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
        if sinks_H is None:
            out = attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=is_grouped)
        else:
            sizes = AuxRequest(lse=True)
            out, aux = attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=is_grouped, return_aux=sizes)
            out = (out * torch.sigmoid(aux.lse - sinks_H[:, None])[..., None]).to(q.dtype)
    elif sinks_H is not None:
        out = _with_sink_key(q, k, v, mask, scale, sinks_H)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
        )
    return out.transpose(1, 2)


def _with_sink_key(q_BHQD: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks_H: Tensor) -> Tensor:
    """SDPA does not return the log-sum-exp of scores. So the sink is the first key: its scores are those of a column
    behind queries, in which it has 1 and other keys 0. Its value is 0. -> [B, H, Q, Dv].

    The causal mask gives queries as many keys as come before, so without another mask there is one more query, too.
    """
    width, shift = v.shape[-1], int(mask is None)
    column = (sinks_H / scale).to(q_BHQD.dtype)[:, None, None].expand(*q_BHQD.shape[:3], 1)
    q = F.pad(torch.cat([q_BHQD, column], dim=-1), (0, SINK_COLUMNS - 1, shift, 0))
    is_sink = torch.arange(k.shape[2] + 1, device=k.device)[:, None] == 0
    k = torch.cat([F.pad(k, (0, 0, 1, 0)), is_sink.to(k.dtype).expand(*k.shape[:2], -1, -1)], dim=-1)
    k, v = F.pad(k, (0, SINK_COLUMNS - 1)), F.pad(v, (0, SINK_COLUMNS, 1, 0))
    mask = mask if mask is None else F.pad(mask, (1, 0), value=True)
    is_grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
    )
    return out[:, :, shift:, :width]


def heads_of_this_rank(sinks_H: Tensor) -> Tensor:
    """The default of `own_heads` of attention layers: a rank has all heads of the parameter."""
    return sinks_H


def keys_of_own_tokens(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The default of `gather_keys` of attention layers: a rank has whole sequences, or all tokens of some heads."""
    return first, second


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention for eager code: uncompiled, it would hold all N x N scores."""
    return torch.compile(flex_attention, fullgraph=True)


class OutputGate(nn.Module):
    """Multiply the results of heads by the sigmoid of gates, one a head or one an element (arXiv:2505.06708)."""

    def forward(self, x_BNX: Tensor, gates_BNG: Tensor) -> Tensor:
        """Results [B, N, X] and gates before the sigmoid [B, N, G], G divides X -> [B, N, X]."""
        num_gates = gates_BNG.shape[-1]
        if num_gates == x_BNX.shape[-1]:
            return x_BNX * torch.sigmoid(gates_BNG)
        return (x_BNX.unflatten(-1, (num_gates, -1)) * torch.sigmoid(gates_BNG)[..., None]).flatten(-2)


class GroupedQueryAttention(nn.Module):
    """Attention whose query heads share key/value heads; optional query and key norms (Qwen3, OLMoE).

    Where a rank has queries of some tokens, `gather_keys` takes keys and values to those of whole sequences before they
    attend, or `attend` is another attention than that of one rank. `own_heads` takes the sinks of the heads that it
    computes.
    """

    parameter_kinds = {"sinks": ParameterKind.BIAS}
    residual_ends = ("out.weight",)
    parts = {"forward": ("qkv", "qk_norm_rope", "gate", "core"), "core": ("apply_gate", "out")}

    def __init__(self, config: ModelConfig, kernels: Kernels = DEFAULT_KERNELS) -> None:
        super().__init__()
        a = config.attention
        self.head_dim, self.scale = a.head_dim, a.scale
        self.qkv = nn.Linear(config.hidden_size, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim, bias=a.qkv_bias)
        self.qk_norm_rope = QKNormRope(a, config.norm_eps, kernels.rotary)
        self.out = nn.Linear(a.num_heads * a.head_dim, config.hidden_size, bias=a.out_bias)
        gated = a.output_gate_width > 0
        self.gate = nn.Linear(config.hidden_size, a.output_gate_width, bias=False) if gated else None
        self.apply_gate = OutputGate() if gated else None
        self.gather_keys: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = keys_of_own_tokens
        self.register_parameter("sinks", nn.Parameter(torch.zeros(a.num_heads)) if a.sinks else None)
        self.own_heads: Callable[[Tensor], Tensor] = heads_of_this_rank
        self.attend: Callable[..., Tensor] = causal_attention
        self.fused_rows = {"qkv.weight": tuple(n * a.head_dim for n in (a.num_heads, a.num_kv_heads, a.num_kv_heads))}

    def forward(self, x_BND: Tensor, context: Context) -> Tensor:
        """[B, N, D] -> [B, N, D]."""
        tables = context.cos_NR, context.sin_NR
        q_BNHD, k_BNHD, v_BNHD = self.qk_norm_rope(self.qkv(x_BND), *tables, context.has_rope, context.query_factors_N)
        if context.cache is None:  # which has the keys of all tokens
            k_BNHD, v_BNHD = self.gather_keys(k_BNHD, v_BNHD)
        gates = () if self.gate is None else (self.gate(x_BND),)
        return self.core(q_BNHD, k_BNHD, v_BNHD, context, *gates)

    def core(
        self, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, context: Context, gates_BNG: Tensor | None = None
    ) -> Tensor:
        """Attention itself, its gate and the output projection: -> [B, N, D]."""
        sinks = () if self.sinks is None else (self.own_heads(self.sinks),)
        attend = self.attend if context.cache is None else causal_attention
        attended_BNX = attend(q_BNHD, k_BNHD, v_BNHD, context, self.scale, *sinks).flatten(2)
        return self.out(attended_BNX if self.apply_gate is None else self.apply_gate(attended_BNX, gates_BNG))
