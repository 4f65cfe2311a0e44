"""Adapters beside frozen weights on a GPU: fused experts, codes, and graphs of whole steps."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.kernel_samples import sample_plans
from torch import Tensor

from titan_moe.kernels.experts.adapted_mlp import adapted_mlp
from titan_moe.kernels.experts.composite_mlp import CompositeMLP
from titan_moe.kernels.experts.fused_mlp import fused_expert_mlp
from titan_moe.kernels.experts.grouped_mm import GROUPED_GEMM
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.kernels.formats.stored import CODES, numbers_in_triton, numbers_reference, scales_shape, store
from titan_moe.kernels.linear.adapted import adapted_linear, adapted_linear_reference
from titan_moe.kernels.linear.stored import stored_linear

pytestmark = pytest.mark.gpu
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
D, F, RANK = 256, 192, 16
BF16 = torch.bfloat16


def codes_of(weight: Tensor, base: str) -> tuple[Tensor, Tensor]:
    codes = torch.empty_like(weight, dtype=CODES)
    scales = torch.empty(scales_shape(tuple(weight.shape), base), device=weight.device)
    store(weight, codes, scales)
    return codes, scales


@pytest.mark.parametrize("base", ["fp8_rowwise", "fp8_blockwise"])
def test_numbers_are_those_of_the_definition(base: str) -> None:
    codes, scales = codes_of(torch.randn(3, 2, 200, 1000, device="cuda"), base)
    for dtype in (BF16, torch.float32):
        assert numbers_in_triton(codes, scales, dtype).equal(numbers_reference(codes, scales, dtype))


def test_a_linear_layer_keeps_no_number() -> None:
    codes, scales = codes_of(torch.randn(512, 384, device="cuda"), "fp8_rowwise")
    x = torch.randn(4, 32, 384, device="cuda", dtype=BF16, requires_grad=True)
    y, exact = stored_linear(x, codes, scales), x @ numbers_reference(codes, scales, BF16).T
    grad = torch.randn_like(y)
    torch.testing.assert_close(y, exact)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, grad) for out in (y, exact)))


@pytest.mark.parametrize("base", ["compute", "fp8_rowwise"])
def test_a_linear_layer_adds_its_factors(base: str) -> None:
    """Of three matrices, eagerly and compiled, beside the definition in fp32."""
    rows, scale, weight = (256, 64, 64), 2.0, torch.randn(384, 512, device="cuda") / 512**0.5
    stored, scales = (weight.to(BF16), None) if base == "compute" else codes_of(weight, base)
    numbers = stored.float() if scales is None else numbers_reference(stored, scales, torch.float32)
    sizes = (4, 32, 512), (3 * RANK, 512), (384, RANK)
    leaves = [torch.randn(size, device="cuda", dtype=BF16).div(8).requires_grad_() for size in sizes]
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    right, grad = adapted_linear_reference(wide[0], numbers, None, *wide[1:], rows, scale), None

    def mine(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return adapted_linear(x, stored, scales, None, a, b, rows, scale)

    for call in (mine, torch.compile(mine, fullgraph=True)):
        y = call(*leaves)
        grad = torch.randn_like(y) if grad is None else grad
        results = y, *torch.autograd.grad(y, leaves, grad)
        expected = right, *torch.autograd.grad(right, wide, grad.float(), retain_graph=True)
        for one, other in zip(results, expected, strict=True):
            assert (one.float() - other).norm() <= 1e-2 * other.norm()


@pytest.mark.parametrize("rank", [RANK, 40])
@pytest.mark.parametrize("base", ["compute", "fp8_rowwise", "fp8_blockwise"])
@pytest.mark.parametrize("plan", [plan[0] for plan in sample_plans(torch.device("cpu"))])
def test_fused_experts_are_the_composed_ones(plan: str, base: str, rank: int) -> None:
    """Values, and gradients of rows, scores and factors; memory is poisoned before."""
    torch.manual_seed(0)
    rows_R, slots_SK, offsets_e, number = {each[0]: each[1:] for each in sample_plans(torch.device("cuda"))}[plan]
    drawn = [torch.randn(number, 2, F, D, device="cuda") / D**0.5, torch.randn(number, D, F, device="cuda") / F**0.5]
    sizes = (2, rank, D), (2, F, rank), (rank, F), (D, rank)
    factors = tuple((torch.randn(number, *size, device="cuda", dtype=BF16) / 8).requires_grad_() for size in sizes)
    weights = ExpertWeights.of([weight.to(BF16) for weight in drawn])
    if base != "compute":
        codes, scales = zip(*(codes_of(weight, base) for weight in drawn), strict=True)
        weights = ExpertWeights.of(codes)._replace(scales=scales)
    weights = weights._replace(factors=factors)
    x_SD = torch.randn(len(slots_SK), D, device="cuda", dtype=BF16, requires_grad=True)
    slots = ExpertSlots(rows_R, slots_SK, torch.rand(rows_R.numel(), device="cuda", requires_grad=True), offsets_e)
    results, dy_SD = [], torch.randn(len(slots_SK), D, device="cuda", dtype=BF16)
    for mlp in (fused_expert_mlp, CompositeMLP(GROUPED_GEMM["grouped_mm"])):
        torch.full((1 << 24,), torch.nan, device="cuda")
        y_SD = adapted_mlp(mlp, 2.0)(x_SD, slots, weights)
        grads = torch.autograd.grad(y_SD, [x_SD, slots.scores_R, *factors], dy_SD)
        results.append([y_SD, grads[0], grads[1][: int(offsets_e[-1])], *grads[2:]])
    for mine, right in zip(*results, strict=True):
        assert (mine - right).float().norm() <= 2e-2 * right.float().norm() + 1e-6


RUN = (
    "--run.device=cuda",
    "--precision.compute=bf16",
    "--train.steps=30",
    "--model.adapter.rank=16",
    "--optim.lr=1e-3",
    "--metrics.every_steps=1",
    "--metrics.sample_tokens=0",
    "--metrics.tensorboard=false",
    "--validation.every_steps=0",
)


@pytest.mark.parametrize("base", ["compute", "fp8_rowwise"])
def test_fused_and_captured_steps_learn_as_composed_ones(
    tmp_path: Path, train_on_ranks: Callable[..., list[int]], base: str
) -> None:
    """From one random base: composed and eager, fused and compiled, and as a graph of the whole step."""
    losses = {}
    for name, words in {
        "composed": ("--perf.kernels=grouped_mm", "--compile.regional=off"),
        "fused": ("--perf.kernels=fused",),
        "captured": ("--perf.kernels=fused", "--compile.cudagraph=step", '--memory.recompute=["block"]'),
    }.items():
        folder = tmp_path / name
        run = ("train", str(QUICKSTART), f"--run.folder={folder}", *RUN, f"--model.adapter.base={base}", *words)
        assert train_on_ranks(1, list(run)) == [0]
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses[name] = torch.tensor([record["loss"] for record in records if "loss" in record])
    assert losses["composed"][-5:].mean() < losses["composed"][0]
    for name in ("fused", "captured"):
        torch.testing.assert_close(losses[name], losses["composed"], rtol=1e-2, atol=0)


def test_the_bf16_model_never_exists(tmp_path: Path, train_on_ranks: Callable[..., list[int]]) -> None:
    """The peak of a run of codes, from its start, is below the bytes of its experts in bf16."""
    experts = 4 * 64 * 3 * 1024 * 1024
    shape = ("--model.hidden_size=1024", "--model.moe.num_experts=64", "--model.moe.ffn_hidden_size=1024")
    small = ("--train.steps=2", "--train.micro_batch_sequences=1", "--train.global_batch_sequences=1")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    words = (*RUN, *shape, *small, "--checkpoint.save_last_step=false", "--model.adapter.base=fp8_rowwise")
    run = ("train", str(QUICKSTART), f"--run.folder={tmp_path / 'codes'}", *words, "--model.adapter.rank=8")
    assert train_on_ranks(1, list(run)) == [0]
    assert torch.cuda.max_memory_allocated() - before < 2 * experts
