"""Attention's kernels on a GPU against all scores in fp32: FlexAttention's documents and windows, cuDNN's MLA heads."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_moe.compile import regional
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig
from titan_moe.config.perf import CompileConfig
from titan_moe.layers.attention import Context, causal_attention
from titan_moe.layers.init import init_weights
from titan_moe.layers.mask import MaskSpec, block_mask, dense_mask
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.attention_block import AttendedBlock, attend_to_block, block_gradients, merge

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NUM_TOKENS = 1024
SHAPES = {"gqa": (8, 2, 128, 128), "mla": (4, 4, 192, 128)}  # heads, key/value heads, widths of keys and values
HIDDEN = {"window": (200, False), "documents": (NUM_TOKENS, True), "both": (200, True)}  # window, documents
GQA = AttentionConfig(
    num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True, sliding_window=200, full_attention_every=2
)
MLA = replace(
    GQA, kind="mla", qk_norm=False, kv_lora_rank=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
CONFIG = ModelConfig(vocab_size=512, num_layers=2, hidden_size=256, ffn_hidden_size=256, attention=GQA)


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def document_ids(num_tokens: int, seed: int = 0) -> Tensor:
    """Two sequences of documents with borders anywhere."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(2, num_tokens, generator=generator) < 0.01).cumsum(1).int().to(CUDA)


def heads(shape: tuple[int, int, int, int], num_tokens: int = NUM_TOKENS) -> list[Tensor]:
    num_heads, num_kv_heads, width, value_width = shape
    sizes = ((num_heads, width), (num_kv_heads, width), (num_kv_heads, value_width))
    return [torch.randn(2, num_tokens, *size, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for size in sizes]


def assert_near(actual: Tensor, expected: Tensor, bound: float = 1e-2) -> None:
    error = ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
    assert error < bound, f"differs by {error:.1e}"


def assert_values_and_gradients(
    attend: Callable[..., Tensor], expected_from: Callable[..., Tensor], qkv: list[Tensor]
) -> None:
    wide = [x.detach().float().requires_grad_() for x in qkv]
    actual, expected = attend(*qkv), expected_from(*wide)
    direction = torch.randn_like(expected)
    gradients = torch.autograd.grad(actual, qkv, direction.to(actual.dtype))
    assert_near(actual, expected)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, wide, direction), strict=True):
        assert_near(gradient, wanted)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["alone", "in a compiled piece"])
@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_flex_is_the_truth_table(shape: tuple[int, int, int, int], hidden: tuple[int, bool], is_compiled: bool) -> None:
    window, has_documents = hidden
    empty = torch.empty(0, device=CUDA)
    spec = MaskSpec(NUM_TOKENS, window, document_ids(NUM_TOKENS) if has_documents else None, CUDA)
    blocks, table = (Context(empty, empty, make(spec)) for make in (block_mask, dense_mask))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, blocks, 0.1)

    def by_table(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return causal_attention(q, k, v, table, 0.1)

    assert_values_and_gradients(
        torch.compile(attend, fullgraph=True) if is_compiled else attend, by_table, heads(shape)
    )


@pytest.mark.parametrize("is_compiled", [False, True], ids=["alone", "in a compiled piece"])
@pytest.mark.parametrize("make", [block_mask, dense_mask, lambda spec: None], ids=["flex", "dense", "causal"])
def test_sinks_are_those_of_the_truth_table(make: Callable[[MaskSpec], Any], is_compiled: bool) -> None:
    empty, window = torch.empty(0, device=CUDA), 100 if make in (block_mask, dense_mask) else NUM_TOKENS
    spec = MaskSpec(NUM_TOKENS, window, None, CUDA)
    own, table = (Context(empty, empty, make_mask(spec)) for make_mask in (make, dense_mask))

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return causal_attention(q, k, v, own, 0.1, sinks)

    def by_table(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return causal_attention(q, k, v, table, 0.1, sinks)

    inputs = heads((8, 2, 64, 64))
    inputs.append(torch.randn(8, device=CUDA, dtype=torch.bfloat16, requires_grad=True))
    assert_values_and_gradients(torch.compile(attend, fullgraph=True) if is_compiled else attend, by_table, inputs)


def test_flex_never_holds_the_table() -> None:
    num_tokens = 16384
    q, k, v = (x.detach() for x in heads((2, 2, 64, 64), num_tokens))
    empty, spec = torch.empty(0, device=CUDA), MaskSpec(num_tokens, 512, document_ids(num_tokens), CUDA)
    causal_attention(q, k, v, Context(empty, empty, block_mask(spec)), 0.1)  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    causal_attention(q, k, v, Context(empty, empty, block_mask(spec)), 0.1)
    assert torch.cuda.max_memory_allocated() - before < num_tokens**2 // 4, "a truth table takes twice N x N bytes"


def test_cudnn_serves_the_heads_of_mla() -> None:
    def by(backend: SDPBackend) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)

        return attend

    assert_values_and_gradients(by(SDPBackend.CUDNN_ATTENTION), by(SDPBackend.MATH), heads(SHAPES["mla"]))


def built(config: ModelConfig, attention: str, compiled: str, dtype: torch.dtype) -> Transformer:
    model = Transformer(config, kernels=Kernels(attention=attention)).to(CUDA, dtype)
    regional.apply(model, CompileConfig(compiled), CUDA)
    init_weights(model, seed=0, std=0.05, num_layers=config.num_layers)
    return model


@pytest.mark.parametrize("attention", [GQA, MLA], ids=["gqa", "mla"])
def test_compiled_flex_trains_like_the_truth_table(attention: AttentionConfig) -> None:
    """Queries and keys are made inside the piece, values are a view: what a graph around FlexAttention looks like."""
    config = replace(CONFIG, attention=attention)
    models = [built(config, "sdpa", "off", torch.float32), built(config, "flex", "on", torch.bfloat16)]
    tokens, labels = torch.randint(512, (2, 2, NUM_TOKENS), device=CUDA).unbind()
    losses = [model(tokens, labels, document_ids(NUM_TOKENS)) for model in models]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0)
    for loss in losses:
        loss.backward()
    for parameter, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_near(other.grad, parameter.grad, 5e-2)


def test_new_documents_cost_no_graph_and_no_wait() -> None:
    model = built(CONFIG, "flex", "on", torch.bfloat16)
    tokens, labels = torch.randint(512, (2, 2, NUM_TOKENS), device=CUDA).unbind()
    documents = [document_ids(NUM_TOKENS, seed) for seed in range(4)]
    for ids in documents[:2]:
        model(tokens, labels, ids).backward()
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids in documents[2:]:
            model(tokens, labels, ids).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_sequences_of_any_length(compiled: str) -> None:
    expected, actual = built(CONFIG, "sdpa", "off", torch.float32), built(CONFIG, "flex", compiled, torch.bfloat16)
    tokens = torch.randint(512, (1, 700), device=CUDA)
    with torch.no_grad():
        for num_tokens in (1, 2, 199, 200, 201, 202, 255, 256, 257, 513, 700):
            assert_near(actual(tokens[:, :num_tokens]), expected(tokens[:, :num_tokens]), 5e-2)


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_attention_in_blocks_of_keys_is_attention_to_all(backend: str) -> None:
    """As in a ring of two ranks, of which this is the second: the last queries, with keys before them and their own."""
    scale, half = 0.1, NUM_TOKENS // 2
    q, k, v = (x.detach() for x in heads(SHAPES["gqa"]))
    q = q[:, half:]
    dout = torch.randn_like(q)
    parts = (slice(half, None), True), (slice(half), False)
    own, before = (
        attend_to_block(q, k[:, part], v[:, part], backend, scale, is_causal=is_causal) for part, is_causal in parts
    )
    total = AttendedBlock(own.out_BnHD.float(), own.lse_BHn.contiguous())
    merge(total, before)
    whole = AttendedBlock(total.out_BnHD.to(q.dtype), total.lse_BHn)
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    k_all, v_all = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in exact[1:])
    scores = torch.einsum("bqhd,bkhd->bhqk", exact[0], k_all) * scale
    hidden = torch.ones(half, NUM_TOKENS, dtype=torch.bool, device=CUDA).triu(half + 1)
    scores = scores.masked_fill(hidden, float("-inf"))
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v_all)
    assert_near(whole.out_BnHD, expected)
    assert_near(whole.lse_BHn, scores.logsumexp(-1), 1e-3)
    dq, dk, dv = torch.autograd.grad(expected, exact, dout.float())
    dq_sum = torch.zeros_like(dq)
    for part, is_causal in parts:
        keys, values = k[:, part], v[:, part]
        grads = block_gradients(dout, q, keys, values, whole, backend, scale, is_causal=is_causal)
        dq_sum += grads[0]
        assert_near(grads[1], dk[:, part])
        assert_near(grads[2], dv[:, part])
    assert_near(dq_sum, dq)
