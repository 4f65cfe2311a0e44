"""FlexAttention with block masks equals SDPA with dense masks. PyTorch allows its training only on GPUs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as flex

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.layers.attention import Context, causal_attention
from titan_moe.layers.init import init_weights
from titan_moe.layers.mask import MaskSpec, block_mask, dense_mask
from titan_moe.models.transformer import Transformer

pytestmark = pytest.mark.slow

EMPTY = torch.empty(0)
SHAPES = {"gqa": (4, 2, 16, 16), "mla": (2, 2, 192, 128)}  # heads, key/value heads, widths of keys and values
GQA = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=16, sliding_window=5, full_attention_every=2)
MLA = replace(GQA, kind="mla", kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
MOE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16)
CONFIG = ModelConfig(vocab_size=32, num_layers=4, hidden_size=16, attention=GQA, moe=MOE)


@pytest.fixture
def trains_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove PyTorch's device check, so that its eager fallback, which has gradients, runs on the CPU."""
    monkeypatch.setattr(flex, "_validate_device", lambda query, key, value: None)


@pytest.fixture(autouse=True)
def reset_dynamo() -> None:
    torch._dynamo.reset()


def documents(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.tensor(lengths))[None]


SPECS = {
    "causal": MaskSpec(150, 150, None, EMPTY.device),
    "window": MaskSpec(150, 20, None, EMPTY.device),
    "documents": MaskSpec(150, 150, documents(3, 130, 17), EMPTY.device),
    "both": MaskSpec(150, 20, documents(3, 130, 17), EMPTY.device),
    "queries": MaskSpec(150, 150, None, EMPTY.device, torch.tensor([*range(20), *range(130, 150)])),
    "all": MaskSpec(150, 20, documents(3, 130, 17), EMPTY.device, torch.arange(5, 140)),
}


@pytest.mark.usefixtures("trains_on_cpu")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_flex_values_and_gradients_equal_the_dense_mask(shape: tuple[int, int, int, int], spec: MaskSpec) -> None:
    torch.manual_seed(0)
    heads, kv_heads, width, value_width = shape
    sizes = ((spec.num_queries, heads, width), (150, kv_heads, width), (150, kv_heads, value_width))
    qkv = [torch.randn(1, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    actual, expected = (
        causal_attention(*qkv, Context(EMPTY, EMPTY, make(spec)), 0.1) for make in (block_mask, dense_mask)
    )
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    direction = torch.randn_like(expected)
    gradients, expected_gradients = (torch.autograd.grad(out, qkv, direction) for out in (actual, expected))
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-12, rtol=0)


def with_sinks(q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, sinks_H: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over a column more, which is dropped."""
    repeats = q_BNHD.shape[2] // k_BNHD.shape[2]
    k_BNHD, v_BNHD = k_BNHD.repeat_interleave(repeats, dim=2), v_BNHD.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q_BNHD, k_BNHD) * 0.1
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if mask is None else mask
    column = sinks_H[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores.masked_fill(~mask, -torch.inf), column], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v_BNHD)


@pytest.mark.usefixtures("trains_on_cpu")
@pytest.mark.parametrize("spec", [SPECS["causal"], SPECS["all"]], ids=["causal", "all"])
def test_sinks_join_the_softmax(spec: MaskSpec) -> None:
    torch.manual_seed(0)
    sizes = ((1, spec.num_queries, 6, 6), (1, 150, 2, 6), (1, 150, 2, 5), (6,))
    inputs = [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in sizes]
    mask = None if spec.is_causal_only else dense_mask(spec)
    expected = with_sinks(*inputs, mask)
    direction = torch.randn_like(expected)
    for own_mask in (mask, block_mask(spec)):
        actual = causal_attention(*inputs[:3], Context(EMPTY, EMPTY, own_mask), 0.1, inputs[3])
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
        gradients, expected_gradients = (
            torch.autograd.grad(out, inputs, direction, retain_graph=True) for out in (actual, expected)
        )
        torch.testing.assert_close(gradients, expected_gradients, atol=1e-12, rtol=0)


def build(config: ModelConfig, attention: str) -> Transformer:
    model = Transformer(config, kernels=Kernels(attention=attention))
    init_weights(model, seed=0, std=0.2, num_layers=config.num_layers)
    return model


@pytest.mark.usefixtures("trains_on_cpu")
@pytest.mark.parametrize("attention", [replace(GQA, sinks=True), MLA], ids=["gqa", "mla"])
def test_flex_model_equals_sdpa_model(attention: AttentionConfig) -> None:
    models = [build(replace(CONFIG, attention=attention), kind) for kind in ("sdpa", "flex")]
    tokens, labels = torch.randint(32, (2, 1, 40)).unbind()
    losses = [model(tokens, labels, documents(9, 20, 11)) for model in models]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for (name, parameter), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        error = (other.grad - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, f"{name} differs by {error:.1e}"


def test_flex_generation_across_windows_and_blocks() -> None:
    models = [build(CONFIG, kind) for kind in ("sdpa", "flex")]
    for prompt in (torch.tensor([[11]]), torch.randint(32, (1, 124), generator=torch.Generator().manual_seed(0))):
        tokens, expected = (
            model.generate(prompt, 8, use_cache=False)[:, prompt.shape[1] :] for model in reversed(models)
        )
        assert torch.equal(tokens, expected)
        assert len(tokens.unique()) > 2, "a repeated token would make the comparison trivial"


@pytest.mark.usefixtures("trains_on_cpu")
def test_flex_new_documents_do_not_recompile() -> None:
    """Masks are inputs of a compiled block. Their values and their mask_mod are new in every step."""
    counter, model = CompileCounterWithBackend("aot_eager"), build(replace(CONFIG, num_layers=12), "flex")
    for block in model.layers.values():
        block.front = torch.compile(block.front, backend=counter, fullgraph=True)
    tokens, labels = torch.randint(32, (2, 1, 40)).unbind()
    for lengths in ((9, 20, 11), (40,), (1, 1, 1, 37)):
        model(tokens, labels, documents(*lengths)).backward()
    assert counter.frame_count == 2, "windowed layers and full ones"
