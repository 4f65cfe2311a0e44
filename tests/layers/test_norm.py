"""Blocks whose norms and rotations are Triton: the same parameters, the same numbers, still one graph."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig
from titan_moe.layers.attention import Context
from titan_moe.layers.block import Block
from titan_moe.layers.init import init_weights
from titan_moe.layers.rope import rope_tables

TRITON = replace(DEFAULT_KERNELS, norm="triton", rotary="triton")
GQA = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, qk_norm=True, qkv_bias=True)
ATTENTIONS = {
    "gqa": GQA,
    "gqa_plain": replace(GQA, qk_norm=False, num_kv_heads=4),
    "gqa_interleaved": replace(GQA, rope_is_interleaved=True, yarn_factor=4.0, yarn_original_tokens=4),
    "mla": AttentionConfig(kind="mla", num_heads=2, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6,
                           qk_rope_head_dim=4, v_head_dim=5),
}  # fmt: skip
TOKENS = (2, 7, 16)
DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


def built(attention: AttentionConfig, kernels: Kernels) -> Block:
    return Block(
        ModelConfig(hidden_size=TOKENS[2], ffn_hidden_size=8, attention=attention), is_dense=True, kernels=kernels
    )


def blocks(attention: AttentionConfig) -> list[Block]:
    """The same block in PyTorch and in Triton, with norm weights that are not one."""
    pair = [built(attention, kernels) for kernels in (DEFAULT_KERNELS, TRITON)]
    for block in pair:
        init_weights(block, seed=0, std=0.3, num_layers=1)
        for name, parameter in block.named_parameters():
            if "norm" in name:
                parameter.data *= torch.linspace(0.5, 1.5, parameter.numel())
    return pair


def run_front(block: Block, attention: AttentionConfig, device: str = "cpu") -> list[Tensor]:
    """Both outputs, and the gradients of the input and of every parameter in front of the feed-forward layer."""
    torch.manual_seed(0)
    x_BND = torch.randn(TOKENS, device=device, requires_grad=True)
    outs = block.front(x_BND, Context(*rope_tables(attention, TOKENS[1], x_BND.device), None))
    inputs = [x_BND, *(p for name, p in block.named_parameters() if not name.startswith("feed_forward"))]
    grads = torch.autograd.grad(outs, inputs, [torch.randn_like(out) for out in outs])
    assert [grad.shape for grad in grads] == [x.shape for x in inputs]
    return [*outs, *grads]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_parameters_are_those_of_torch(name: str) -> None:
    plain, triton = blocks(ATTENTIONS[name])
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in triton.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), triton.parameters(), strict=True))
    assert isinstance(triton.ffn_norm, nn.RMSNorm) and isinstance(triton.attention_norm, nn.RMSNorm)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_front_compiles_once_on_tensors_without_memory(name: str) -> None:
    """Meta tensors go through the fake operations, forward and backward, in every block but one graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for _ in range(3):
        with torch.device("meta"):
            block = built(ATTENTIONS[name], TRITON)
        block.front = torch.compile(block.front, fullgraph=True, backend=counter)  # type: ignore[method-assign]
        run_front(block, ATTENTIONS[name], "meta")
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_front_equals_torch(name: str, is_compiled: bool, device: str) -> None:
    torch._dynamo.reset()
    plain, triton = (block.to(device) for block in blocks(ATTENTIONS[name]))
    if is_compiled:
        backend = "inductor" if device == "cuda" else "aot_eager"
        triton.front = torch.compile(triton.front, fullgraph=True, backend=backend)  # type: ignore[method-assign]
    expected, actual = (run_front(block, ATTENTIONS[name], device) for block in (plain, triton))
    tolerance = 1e-3 if device == "cuda" else 2e-5
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
