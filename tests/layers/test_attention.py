"""Attention against one softmax a document and head; it does not cross documents."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from titan_moe.config.model import AttentionConfig, ModelConfig
from titan_moe.layers.attention import BACKENDS, Context, GroupedQueryAttention, attention_backend, causal_attention
from titan_moe.layers.mask import MaskSpec, dense_mask
from titan_moe.layers.mla import MultiHeadLatentAttention
from titan_moe.layers.rope import rope_tables

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, SCALE = 6, 2, 8, 4, 0.3
DOCUMENTS = [[5, 1, 6], [12], [3, 3, 3, 3]]  # lengths in each sequence of 12 tokens
GQA = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True, qkv_bias=True)
MLA = AttentionConfig(kind="mla", num_heads=4, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)


def document_ids() -> Tensor:
    return torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]) for lengths in DOCUMENTS])


def own_document_only() -> Tensor:
    return dense_mask(MaskSpec(12, 12, document_ids(), torch.device("cpu")))


def one_by_one(q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, documents: list[list[int]]) -> Tensor:
    """Softmax over each token's own past, with key/value heads repeated for their query heads."""
    repeats = q_BNHD.shape[2] // k_BNHD.shape[2]
    k_BNHD, v_BNHD = k_BNHD.repeat_interleave(repeats, dim=2), v_BNHD.repeat_interleave(repeats, dim=2)
    rows = []
    for b, lengths in enumerate(documents):
        begin = 0
        for length in lengths:
            for n in range(begin, begin + length):
                past = slice(begin, n + 1)
                weights_HP = torch.einsum("hd,phd->hp", q_BNHD[b, n], k_BNHD[b, past]).mul(SCALE).softmax(-1)
                rows.append(torch.einsum("hp,phd->hd", weights_HP, v_BNHD[b, past]))
            begin += length
    return torch.stack(rows).view(*q_BNHD.shape[:3], -1)


@pytest.mark.parametrize("has_documents", [False, True])
def test_attention_equals_softmax_over_the_visible_past(has_documents: bool) -> None:
    torch.manual_seed(0)
    shapes = ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, VALUE_WIDTH))
    qkv = [torch.randn(3, 12, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    documents = DOCUMENTS if has_documents else [[12]] * 3
    context = Context(torch.empty(0), torch.empty(0), own_document_only() if has_documents else None)
    actual, expected = causal_attention(*qkv, context, SCALE), one_by_one(*qkv, documents)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    direction = torch.randn_like(expected)
    gradients, expected_gradients = (torch.autograd.grad(out, qkv, direction) for out in (actual, expected))
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-12, rtol=0)


def built(config: AttentionConfig) -> nn.Module:
    torch.manual_seed(0)
    kind = {"gqa": GroupedQueryAttention, "mla": MultiHeadLatentAttention}[config.kind]
    return kind(ModelConfig(hidden_size=16, attention=config)).double()


@pytest.mark.parametrize("config", [GQA, MLA], ids=["gqa", "mla"])
def test_attention_in_packed_documents_equals_each_alone(config: AttentionConfig) -> None:
    attention, x_BND = built(config), torch.randn(3, 12, 16, dtype=torch.float64)
    packed = attention(x_BND, Context(*rope_tables(config, 12, x_BND.device), own_document_only()))
    for b, lengths in enumerate(DOCUMENTS):
        for begin, length in zip(torch.tensor([0, *lengths]).cumsum(0).tolist(), lengths, strict=False):
            part = slice(begin, begin + length)
            alone = attention(x_BND[b : b + 1, part], Context(*rope_tables(config, length, x_BND.device), None))
            torch.testing.assert_close(packed[b : b + 1, part], alone, atol=1e-6, rtol=0)  # the tables are fp32


@pytest.mark.parametrize(("kind", "per"), [("head", 1), ("element", 8)])
def test_a_gate_multiplies_what_each_head_attended(kind: str, per: int) -> None:
    config = replace(GQA, output_gate=kind)
    attention, x_BND = built(config), torch.randn(3, 12, 16, dtype=torch.float64)
    plain = built(GQA)
    plain.load_state_dict({name: t for name, t in attention.state_dict().items() if not name.startswith("gate")})
    attended: list[Tensor] = []
    plain.out.register_forward_pre_hook(lambda _, args: attended.append(args[0]))
    context = Context(*rope_tables(config, 12, x_BND.device), None)
    plain(x_BND, context)
    gates = torch.sigmoid(x_BND @ attention.gate.weight.T).view(3, 12, 4, per)
    gated = (attended[0].view(3, 12, 4, 8) * gates).flatten(2)
    torch.testing.assert_close(attention(x_BND, context), plain.out(gated), atol=1e-12, rtol=0)


@pytest.mark.parametrize("config", [GQA, MLA], ids=["gqa", "mla"])
def test_attention_is_causal(config: AttentionConfig) -> None:
    attention, x_BND = built(config), torch.randn(1, 12, 16, dtype=torch.float64)
    context = Context(*rope_tables(config, 12, x_BND.device), None)
    other_BND = x_BND.clone()
    other_BND[:, 7:] += 1
    before, after = attention(x_BND, context), attention(other_BND, context)
    torch.testing.assert_close(before[:, :7], after[:, :7], atol=1e-14, rtol=0)
    assert (before[:, 7:] - after[:, 7:]).abs().amin(-1).min() > 1e-6


def halves(weight: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
    """A weight of several parts, each sharded over two ranks."""
    return [
        torch.cat(half, dim) for half in zip(*(part.chunk(2, dim) for part in weight.split(sizes, dim)), strict=True)
    ]


def ranks_of(whole: nn.Module, sizes: dict[str, list[int]]) -> list[nn.Module]:
    """Two copies with half of the heads each, as in tensor parallelism; the output's columns are sharded too."""
    cut = {name: halves(whole.get_parameter(name), parts, 0) for name, parts in sizes.items()}
    cut["out.weight"] = halves(whole.out.weight, [whole.out.in_features], 1)
    copies = [deepcopy(whole) for _ in range(2)]
    for rank, copy in enumerate(copies):
        for name, weights in cut.items():
            owner, _, attribute = name.rpartition(".")
            setattr(copy.get_submodule(owner), attribute, nn.Parameter(weights[rank]))
    return copies


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        pytest.param(GQA, {"qkv.weight": [32, 16, 16], "qkv.bias": [32, 16, 16]}, id="gqa"),
        pytest.param(replace(GQA, qk_norm=False), {"qkv.weight": [32, 16, 16], "qkv.bias": [32, 16, 16]}, id="no norm"),
        pytest.param(MLA, {"q_up.weight": [40], "kv_up.weight": [44]}, id="mla"),
    ],
)
def test_attention_head_count_comes_from_the_weights(config: AttentionConfig, sizes: dict[str, list[int]]) -> None:
    attention, x_BND = built(config), torch.randn(3, 12, 16, dtype=torch.float64)
    for parameter in attention.parameters():
        nn.init.normal_(parameter)  # biases and norms that are zero and one would hide a wrong cut
    context = Context(*rope_tables(config, 12, x_BND.device), own_document_only())
    parts = [rank(x_BND, context) for rank in ranks_of(attention, sizes)]
    assert all(part.abs().amin() > 0 for part in parts)
    torch.testing.assert_close(parts[0] + parts[1], attention(x_BND, context), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", [*BACKENDS, "flex"])
def test_attention_backend_prefers_one_with_fallbacks(name: str) -> None:
    attention, x_BND = built(GQA).float(), torch.randn(2, 12, 16)
    context = Context(*rope_tables(GQA, 12, x_BND.device), None)
    expected = attention(x_BND, context)
    with attention_backend(name):  # most of them cannot run on a CPU
        torch.testing.assert_close(attention(x_BND, context), expected)
    with attention_backend("auto"):
        torch.testing.assert_close(attention(x_BND, context), expected)
