"""QK-clip on layouts: which attention layers are measured, and which rows of weights follow which heads."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.config.attention import AttentionConfig
from titan_moe.config.kernels import Backend
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.qk_clip import QKClipConfig
from titan_moe.kernels.attention.max_logits import MaxLogits
from titan_moe.kernels.choose import MAX_LOGITS
from titan_moe.layers.attention import GroupedQueryAttention
from titan_moe.layers.max_logits import LargestLogits, MeasuredAttention
from titan_moe.layers.mla import MultiHeadLatentAttention
from titan_moe.models.transformer import Transformer
from titan_moe.optim.qk_clip import QKClip, RowPowers
from titan_moe.parallel.mesh import Meshes
from titan_moe.parallel.ring_attention import RingMaxLogits
from titan_moe.parameters import TENSOR_AXIS

Attention = GroupedQueryAttention | MultiHeadLatentAttention


def measure_logits(
    part: nn.Module, attention: AttentionConfig, config: ParallelConfig, meshes: Meshes, kernels: Backend
) -> None:
    """Let attention layers measure their logits, in place, after tensor and context parallelism. Parameters do not
    change."""
    group, num_heads = meshes.dense["cp"].get_group(), attention.num_heads // config.tp
    first_head = meshes.dense.get_local_rank(TENSOR_AXIS) * num_heads
    if config.cp > 1 and config.cp_kind == "ulysses":
        first_head += group.rank() * (num_heads // config.cp)
    is_ring = config.cp > 1 and config.cp_kind == "ring"
    measure: MaxLogits = RingMaxLogits(group, kernels) if is_ring else MAX_LOGITS[kernels]
    for module in list(part.modules()):
        match module:
            case GroupedQueryAttention() | MultiHeadLatentAttention():
                like = module.out._parameters["weight"]
                assert like is not None
                module.largest_logits = LargestLogits(attention.num_heads, like)
                module.attend = MeasuredAttention(module.attend, module.largest_logits, measure, first_head)
            case Transformer():
                module.describes_pairs = True


def build_qk_clip(
    parts: Iterable[nn.Module],
    config: QKClipConfig,
    attention: AttentionConfig,
    group: dist.ProcessGroup,
    device: torch.device,
) -> QKClip:
    """The clip of measured parts, whose parameters are those that the optimizer updates. `group` has the ranks of the
    same layers."""
    layers = [it for part in parts for it in part.modules() if isinstance(it, Attention)]
    buffers = [layer.get_buffer("largest_logits.logits_H") for layer in layers]
    is_mla = attention.kind == "mla"
    rows_of = _rows_of_mla if is_mla else _rows_of_gqa
    weights = [
        RowPowers(parameters, matrices, heads_R.to(device), powers_R.to(device))
        for name, matrices, heads_R, powers_R in rows_of(attention, config.alpha)
        if (parameters := _named(layers, name))
    ]
    return QKClip(config, buffers, attention.num_heads if is_mla else attention.num_kv_heads, weights, group)


def _named(layers: Iterable[Attention], name: str) -> list[Tensor]:
    """A parameter of each layer; empty for one that layers lack."""
    owner, _, attribute = name.rpartition(".")
    found = (layer.get_submodule(owner)._parameters.get(attribute) for layer in layers)
    return [parameter for parameter in found if parameter is not None]


Rows = tuple[str, tuple[int, ...], Tensor, Tensor]
"""Name of a parameter, rows of its matrices, the head of each row and its power of the head's factor."""


def _rows_of_gqa(a: AttentionConfig, alpha: float) -> list[Rows]:
    """The fused projection of queries, keys and values; the heads are those of keys."""
    width, shared = a.head_dim, a.num_heads // a.num_kv_heads
    of_keys = torch.arange(a.num_kv_heads).repeat_interleave(width)
    heads_R = torch.cat([torch.arange(a.num_kv_heads).repeat_interleave(shared * width), of_keys, of_keys])
    sizes = a.num_heads * width, len(of_keys), len(of_keys)
    powers_R = torch.cat([torch.full((n,), x) for n, x in zip(sizes, (alpha, 1 - alpha, 0.0), strict=True)])
    return [("qkv.weight", sizes, heads_R, powers_R), ("qkv.bias", sizes, heads_R, powers_R)]


def _rows_of_mla(a: AttentionConfig, alpha: float) -> list[Rows]:
    """Each head has rows without rotation and others: rotated ones of queries, and values."""
    nope = a.qk_nope_head_dim

    def rows(name: str, power: float, others: int, power_of_others: float) -> Rows:
        of_head = torch.tensor([power] * nope + [power_of_others] * others)
        heads_R = torch.arange(a.num_heads).repeat_interleave(len(of_head))
        return name, (), heads_R, of_head.repeat(a.num_heads)

    return [rows("q_up.weight", alpha, a.qk_rope_head_dim, 1.0), rows("kv_up.weight", 1 - alpha, a.v_head_dim, 0.0)]
