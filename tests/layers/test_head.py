"""The head uses the loss of its backend, and compiles only that of PyTorch."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from titan_moe.compile import regional
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig
from titan_moe.config.perf import CompileConfig
from titan_moe.kernels.loss.cross_entropy import IGNORE_LABEL, linear_cross_entropy
from titan_moe.kernels.loss.fused_cross_entropy import fused_cross_entropy
from titan_moe.layers.head import LanguageModelHead
from titan_moe.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=24,
    num_layers=1,
    hidden_size=16,
    ffn_hidden_size=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
)


@pytest.mark.parametrize(("backend", "expected"), [("torch", linear_cross_entropy), ("triton", fused_cross_entropy)])
def test_head_loss_is_the_chosen_backend(backend: str, expected: object) -> None:
    assert Transformer(CONFIG, kernels=Kernels(head=backend)).head.cross_entropy is expected
    assert Transformer(CONFIG).head.cross_entropy is linear_cross_entropy


def test_head_compiles_the_softmax_of_pytorch_alone() -> None:
    models = [Transformer(CONFIG, kernels=Kernels(head=backend)) for backend in ("torch", "triton")]
    for model in models:
        regional.apply(model, CompileConfig("on"), torch.device("cpu"))
    compiled, kept = (model.head.cross_entropy for model in models)
    assert isinstance(compiled, partial) and compiled.func is linear_cross_entropy
    assert kept is fused_cross_entropy


@pytest.mark.parametrize("scaling", [1.0, 6.0])
def test_head_loss_is_that_of_the_logits(scaling: float) -> None:
    torch.manual_seed(0)
    head = LanguageModelHead(8, 24, loss_chunk_tokens=4, logits_scaling=scaling)
    x_TD, labels_T = torch.randn(10, 8), torch.randint(24, (10,))
    labels_T[3] = IGNORE_LABEL
    torch.testing.assert_close(head(x_TD), x_TD @ head.weight.T / scaling)
    expected = torch.nn.functional.cross_entropy(head(x_TD), labels_T, ignore_index=IGNORE_LABEL, reduction="sum")
    torch.testing.assert_close(head(x_TD, labels_T), expected)
    assert torch.equal(head(x_TD.view(2, 5, 8), labels_T.view(2, 5)), head(x_TD, labels_T))


@pytest.mark.parametrize("chunk_tokens", [0, 4])
def test_bias_is_added_to_logits_and_gets_its_gradient(chunk_tokens: int) -> None:
    torch.manual_seed(0)
    head = LanguageModelHead(8, 24, chunk_tokens, logits_scaling=6.0, bias=True).double()
    x_TD, labels_T = torch.randn(10, 8, dtype=torch.float64, requires_grad=True), torch.randint(24, (10,))
    labels_T[3] = IGNORE_LABEL
    operands = [x_TD, head.weight, head.bias]
    logits_TV = x_TD / 6 @ head.weight.T + head.bias
    expected = torch.nn.functional.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_LABEL, reduction="sum")
    torch.testing.assert_close(head(x_TD), logits_TV)
    torch.testing.assert_close(head(x_TD, labels_T), expected)
    wanted = torch.autograd.grad(expected, operands)
    torch.testing.assert_close(torch.autograd.grad(head(x_TD, labels_T), operands), wanted)
    with torch.no_grad():
        torch.testing.assert_close(head(x_TD, labels_T), expected)


def test_head_in_triton_has_no_bias() -> None:
    with pytest.raises(ValueError, match='kernels.head = "triton" needs model.head_bias = false'):
        Transformer(replace(CONFIG, head_bias=True), kernels=Kernels(head="triton"))


@pytest.mark.parametrize("label", [-1, 24])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_head_refuses_labels_outside_of_the_vocabulary(label: int, has_gradients: bool) -> None:
    head, labels_T = LanguageModelHead(8, 24, loss_chunk_tokens=4), torch.full((10,), label)
    with torch.set_grad_enabled(has_gradients), pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        head(torch.randn(10, 8), labels_T)
