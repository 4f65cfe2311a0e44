"""Weights in two pieces, own experts and clones behind them, give what they give in one, bit for bit; and so do
hidden states that backward computes again."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.kernel_samples import sample_plans
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from titan_moe.config.recompute import of_entries
from titan_moe.kernels.choose import choose_expert_mlp
from titan_moe.kernels.experts import passes
from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.kernels.experts.fp8.format import FP8_ROWWISE
from titan_moe.kernels.experts.fused_mlp import FusedMLP
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import BIASES, MATRICES, ExpertWeights
from titan_moe.layers.experts import GroupedExperts
from titan_moe.memory import recompute

EXPERTS, OWN, WIDTH, HIDDEN = 5, 3, 64, 48
WITH_BIASES = MATRICES + BIASES
IN_TRITON = ("fused", "wide", "fp8", "biased_fused")


def cases() -> list[Any]:
    """Every MLP wherever it runs, eager and compiled; the one in Triton also as it runs wide experts."""
    found = []
    for kernels in ("grouped_mm", "reference", "biased", *IN_TRITON):
        for is_compiled in (False, True):
            name, is_triton = f"{kernels}-{'compiled' if is_compiled else 'eager'}", kernels in IN_TRITON
            if not (is_triton and is_compiled):
                marks = [pytest.mark.interpreted] if is_triton else [pytest.mark.slow] * is_compiled
                found.append(pytest.param(kernels, is_compiled, "cpu", id=f"{name}-cpu", marks=marks))
            found.append(pytest.param(kernels, is_compiled, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu))
    return found


@pytest.fixture
def names(kernels: str) -> tuple[str, ...]:
    return WITH_BIASES if "biased" in kernels else MATRICES


@pytest.fixture
def mlp(kernels: str, monkeypatch: pytest.MonkeyPatch) -> ExpertMLP:
    if kernels == "wide":
        monkeypatch.setattr(passes, "GATHERS_BEFORE_WEIGHT_GRADIENTS_FROM", 1)
    if kernels == "fp8":
        return FusedMLP(FP8_ROWWISE)
    choice = {"wide": "fused", "biased": "grouped_mm", "biased_fused": "fused"}.get(kernels, kernels)
    return choose_expert_mlp(choice, "activation", has_bias="biased" in kernels)


DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def drawn(name: str, device: str, names: tuple[str, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves x, scores and weights; and the plan: rows, slots, offsets."""
    torch.manual_seed(0)
    plans = {plan[0]: plan[1:4] for plan in sample_plans(torch.device(device))}
    rows_R, slots_SK, offsets_e = plans[name]
    x_SD = torch.randn(slots_SK.shape[0], WIDTH, device=device, dtype=DTYPES[device])
    shapes = {
        "gate_up": (2, HIDDEN, WIDTH),
        "down": (WIDTH, HIDDEN),
        "gate_up_bias": (2, HIDDEN),
        "down_bias": (WIDTH,),
    }
    weights = [torch.randn(EXPERTS, *shapes[name], device=device, dtype=x_SD.dtype) / 7 for name in names]
    leaves = [x_SD, torch.rand(rows_R.numel(), device=device), *weights]
    return [leaf.requires_grad_() for leaf in leaves], [rows_R, slots_SK, offsets_e]


def in_two_pieces(weights: list[Tensor]) -> list[Tensor]:
    """Own pieces, and clones as parts of longer rows."""
    own = [weight.detach()[:OWN].clone() for weight in weights]
    clones = [torch.cat([w, w], -1)[..., : w.shape[-1]] for w in (weight.detach()[OWN:] for weight in weights)]
    return [piece.requires_grad_() for piece in (*own, *clones)]


def run(
    mlp: Callable[..., Tensor], leaves: list[Tensor], plan: list[Tensor], names: tuple[str, ...], *, is_split: bool
) -> list[Tensor]:
    """Output and gradients, those of the weights in one piece."""
    (x_SD, scores_R, *weights), (rows_R, slots_SK, offsets_e) = leaves, plan
    weights = in_two_pieces(weights) if is_split else weights
    y_SD = mlp(x_SD, ExpertSlots(rows_R, slots_SK, scores_R, offsets_e), ExpertWeights.of(weights, names))
    grad_SD = torch.linspace(-1, 1, y_SD.numel()).view_as(y_SD).to(y_SD)
    dx_SD, dscores_R, *grads = torch.autograd.grad(y_SD, [x_SD, scores_R, *weights], grad_SD)
    if is_split:
        grads = [torch.cat(both) for both in zip(grads[: len(names)], grads[len(names) :], strict=True)]
    return [y_SD.detach(), dx_SD, dscores_R[: int(offsets_e[-1])], *grads]


@pytest.mark.parametrize(("kernels", "is_compiled", "device"), cases())
def test_two_pieces_equal_one(mlp: ExpertMLP, names: tuple[str, ...], is_compiled: bool, device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager") if is_compiled else mlp
    for name in ("skewed", "empty_expert", "padded", "no_rows"):
        leaves, plan = drawn(name, device, names)
        split = run(compiled, leaves, plan, names, is_split=True)
        whole = run(mlp, leaves, plan, names, is_split=False)
        for got, wanted in zip(split, whole, strict=True):
            assert torch.equal(got, wanted), name


def without_hidden(mlp: ExpertMLP) -> ExpertMLP:
    """The same, where hidden states of experts are computed again."""
    experts, block, model = GroupedExperts(1, WIDTH, HIDDEN, mlp), torch.nn.Module(), torch.nn.Module()
    block.feed_forward = torch.nn.Module()
    block.feed_forward.experts, model.layers = experts, torch.nn.ModuleList([block])
    recompute.apply(model, of_entries(("moe_act",), 1))
    return experts.mlp


OF_TRITON = [case for case in cases() if case.values[0] in IN_TRITON]


@pytest.mark.parametrize(("kernels", "is_compiled", "device"), OF_TRITON)
def test_hidden_states_that_are_computed_again_have_the_same_bits(
    mlp: ExpertMLP, names: tuple[str, ...], is_compiled: bool, device: str
) -> None:
    """And are not kept. In one piece, and beside clones."""
    torch._dynamo.reset()
    again = without_hidden(mlp)
    again = torch.compile(again, fullgraph=True, backend="aot_eager") if is_compiled else again
    for name, is_split in (("random", True), ("padded", False), ("no_rows", False)):
        leaves, plan = drawn(name, device, names)
        got, wanted = (run(each, leaves, plan, names, is_split=is_split) for each in (again, mlp))
        assert all(map(torch.equal, got, wanted)), name
    leaves, (rows_R, slots_SK, offsets_e) = drawn("random", device, names)
    slots, weights = ExpertSlots(rows_R, slots_SK, leaves[1], offsets_e), ExpertWeights.of(leaves[2:], names)
    kept, not_kept = (saved_bytes(partial(each, leaves[0], slots, weights), leaves) for each in (mlp, again))
    element = 1 if isinstance(mlp, FusedMLP) and mlp.format.is_rounded else leaves[0].element_size()
    assert kept - not_kept >= rows_R.numel() * 2 * HIDDEN * element


def saved_bytes(function: Callable[[], Any], ignored: list[Tensor]) -> int:
    """Bytes that autograd keeps for the backward of a function, each memory once, without that of some tensors."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    for tensor in ignored:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert result is not None
    return sum(kept.values())


@pytest.mark.parametrize(("kernels", "is_compiled", "device"), [case for case in cases() if "biased" not in case.id])
def test_matrices_in_two_pieces_are_not_kept_once_more(
    mlp: ExpertMLP, names: tuple[str, ...], is_compiled: bool, device: str
) -> None:
    (x_SD, scores_R, *weights), (rows_R, slots_SK, offsets_e) = drawn("random", device, names)
    pieces, slots = in_two_pieces(weights), ExpertSlots(rows_R, slots_SK, scores_R, offsets_e)
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager") if is_compiled else mlp
    in_two, in_one, early = (
        saved_bytes(partial(compiled, x_SD, slots, make()), [*weights, *pieces])
        for make in (
            lambda: ExpertWeights.of(pieces, names),
            lambda: ExpertWeights.of(weights, names),
            lambda: ExpertWeights.of(pieces, names).join(),
        )
    )
    assert in_two == in_one
    assert early > in_one, "weights that are joined outside are kept"


def test_weights_are_unpacked_and_packed_again() -> None:
    for names in (MATRICES, WITH_BIASES, (*MATRICES, "down_bias")):
        for pieces in (1, 2):
            tensors = [torch.full((pieces, 1, 1), float(index)) for index in range(pieces * len(names))]
            weights = ExpertWeights.of(tensors, names)
            assert weights.names() == names and all(map(torch.equal, weights.tensors(), tensors))
            assert weights.down.own is tensors[1] and len(weights.join().tensors()) == len(names)
