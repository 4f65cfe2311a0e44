"""Layers of ours under `torch.autocast`: in a user's own loop it surrounds PyTorch's layers and ours."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.kernels.loss import cross_entropy
from titan_moe.kernels.rope.norm_and_rotate import norm_and_rotate_reference
from titan_moe.layers.head import LanguageModelHead
from titan_moe.layers.moe import MoE

WIDTH = 32
PLAIN = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=16)
VARIANTS = {
    "plain": PLAIN,
    "latent, gated shared": replace(PLAIN, latent_size=16, shared_ffn_hidden_size=16, shared_expert_gate=True),
    "biases": replace(PLAIN, expert_mlp_bias=True),
    "scores on the input": replace(PLAIN, score_on="input", score_fn="sigmoid"),
}


def built(moe: MoEConfig, experts: str) -> nn.Sequential:
    """A layer behind a product of PyTorch's, whose rows autocast makes narrow."""
    torch.manual_seed(0)
    config = ModelConfig(hidden_size=WIDTH, init_std=0.2, moe=moe)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(config, kernels=Kernels(experts=experts)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("experts", ["grouped_mm", "reference"])
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_moe_under_autocast_is_that_of_converted_weights(variant: str, experts: str, is_compiled: bool) -> None:
    model, x_BND = built(VARIANTS[variant], experts), torch.randn(2, 8, WIDTH)
    narrow = built(VARIANTS[variant], experts).bfloat16()
    narrow[1].router.float()
    with torch.no_grad():
        narrow[1].router.weight.copy_(model[1].router.weight)
    torch._dynamo.reset()  # all compiled modules share the limit of one function
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_BND = run(x_BND)
    assert y_BND.dtype == torch.bfloat16
    expected_BND = narrow(x_BND.bfloat16())
    torch.testing.assert_close(y_BND, expected_BND, rtol=0.02, atol=0.002)
    for y in (y_BND, expected_BND):
        y.float().square().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    grads = {name: parameter.grad.float() for name, parameter in narrow.named_parameters()}
    for name, parameter in model.named_parameters():
        assert (parameter.grad - grads[name]).norm() < 0.02 * grads[name].norm() + 1e-6, name


def test_router_logits_stay_fp32_under_autocast() -> None:
    (_, layer), x_BND = built(PLAIN, "grouped_mm"), torch.randn(2, 8, WIDTH)
    scores_TK, ids_TK = layer.router(x_BND)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores, ids = layer.router(x_BND)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, scores_TK) and torch.equal(ids, ids_TK)


def test_autocast_leaves_fp64_alone() -> None:
    model, x_BND = built(PLAIN, "reference").double(), torch.randn(2, 8, WIDTH, dtype=torch.float64)
    expected = model(x_BND)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x_BND), expected)


def test_head_multiplies_in_one_dtype_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast does not cast for the GPU's GEMM that adds to fp32, and norms give the head rows in fp32."""
    torch.manual_seed(0)
    head, x_TD, labels_T = LanguageModelHead(WIDTH, 24, loss_chunk_tokens=4), torch.randn(10, WIDTH), torch.arange(10)
    expected = torch.autograd.grad(head(x_TD, labels_T), head.weight)[0]
    dtypes, add_product = [], cross_entropy._add_product

    def record(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dtypes.append((a.dtype, b.dtype))
        return add_product(total, a, b)

    monkeypatch.setattr(cross_entropy, "_add_product", record)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head(x_TD, labels_T)
    loss.backward()
    assert set(dtypes) == {(torch.bfloat16, torch.bfloat16)}
    assert loss.dtype == head.weight.grad.dtype == torch.float32
    assert (head.weight.grad - expected).norm() < 0.02 * expected.norm()


def test_queries_and_keys_keep_the_dtype_of_values_where_autocast_norms_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rms_norm = F.rms_norm
    monkeypatch.setattr(F, "rms_norm", lambda x, *rest: rms_norm(x.float(), *rest))  # as autocast does on GPUs
    qkv_BNX, ones_D, tables_NR = torch.randn(1, 3, 4 * 8).bfloat16(), torch.ones(8), torch.ones(3, 4)
    heads = norm_and_rotate_reference(qkv_BNX, ones_D, ones_D, tables_NR, tables_NR, 1, 8, 1e-6, False)
    assert [x.dtype for x in heads] == [torch.bfloat16] * 3
