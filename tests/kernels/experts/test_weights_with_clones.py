"""Weights in two pieces, own experts and clones behind them, give what they give in one, bit for bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from titan_moe.kernels.experts.composite_mlp import ExpertMLP, choose_expert_mlp
from titan_moe.kernels.permute.rows import sample_plans

EXPERTS, OWN, WIDTH, HIDDEN = 5, 3, 64, 40
WIDE_FROM = "GATHERS_BEFORE_WEIGHT_GRADIENTS_FROM"


def cases() -> list[Any]:
    """Every MLP wherever it runs, eager and compiled; the one in Triton also as it serves wide experts."""
    found = []
    for kernels in ("grouped_mm", "reference", "fused", "wide"):
        for is_compiled in (False, True):
            name, is_triton = f"{kernels}-{'compiled' if is_compiled else 'eager'}", kernels in ("fused", "wide")
            if not (is_triton and is_compiled):
                marks = [pytest.mark.interpreted] if is_triton else []
                found.append(pytest.param(kernels, is_compiled, "cpu", id=f"{name}-cpu", marks=marks))
            found.append(pytest.param(kernels, is_compiled, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu))
    return found


@pytest.fixture
def mlp(kernels: str, monkeypatch: pytest.MonkeyPatch) -> ExpertMLP:
    if kernels == "wide":
        from titan_moe.kernels import fused_expert_mlp

        monkeypatch.setattr(fused_expert_mlp, WIDE_FROM, 1)
    return choose_expert_mlp("fused" if kernels == "wide" else kernels, "activation")


DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def drawn(name: str, device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves x, scores, gate_up and down; and the plan: rows, slots, offsets."""
    torch.manual_seed(0)
    plans = {plan[0]: plan[1:4] for plan in sample_plans(torch.device(device))}
    rows_R, slots_SK, offsets_e = plans[name]
    x_SD = torch.randn(slots_SK.shape[0], WIDTH, device=device, dtype=dtype)
    gate_up = torch.randn(EXPERTS, 2, HIDDEN, WIDTH, device=device, dtype=dtype) / 8
    down = torch.randn(EXPERTS, WIDTH, HIDDEN, device=device, dtype=dtype) / 6
    leaves = [x_SD, torch.rand(rows_R.numel(), device=device), gate_up, down]
    return [leaf.requires_grad_() for leaf in leaves], [rows_R, slots_SK, offsets_e]


def serve(mlp: Callable[..., Tensor], leaves: list[Tensor], plan: list[Tensor], *, is_split: bool) -> list[Tensor]:
    """Output and gradients, those of the weights in one piece."""
    (x_SD, scores_R, *weights), (rows_R, slots_SK, offsets_e) = leaves, plan
    if is_split:
        pieces = [weight.detach().split([OWN, EXPERTS - OWN]) for weight in weights]
        # clones come as parts of a longer row
        weights = [piece.clone() for piece in (pieces[0][0], pieces[1][0])]
        weights += [torch.cat([piece, piece], -1)[..., : piece.shape[-1]] for piece in (pieces[0][1], pieces[1][1])]
        weights = [weight.requires_grad_() for weight in weights]
    y_SD = mlp(x_SD, rows_R, slots_SK, scores_R, offsets_e, *weights)
    grads = torch.autograd.grad(
        y_SD, [x_SD, scores_R, *weights], torch.linspace(-1, 1, y_SD.numel()).view_as(y_SD).to(y_SD)
    )
    if is_split:
        grads = (*grads[:2], torch.cat([grads[2], grads[4]]), torch.cat([grads[3], grads[5]]))
    used = int(offsets_e[-1])
    return [y_SD.detach(), grads[0], grads[1][:used], *grads[2:]]


@pytest.mark.parametrize(("kernels", "is_compiled", "device"), cases())
def test_two_pieces_equal_one(mlp: ExpertMLP, is_compiled: bool, device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager") if is_compiled else mlp
    for name in ("random", "skewed", "empty_expert", "padded", "no_rows"):
        leaves, plan = drawn(name, device, DTYPES[device])
        split, whole = serve(compiled, leaves, plan, is_split=True), serve(mlp, leaves, plan, is_split=False)
        for got, wanted in zip(split, whole, strict=True):
            assert torch.equal(got, wanted), name


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


@pytest.mark.parametrize(("kernels", "is_compiled", "device"), cases())
def test_weights_in_two_pieces_are_not_kept_once_more(mlp: ExpertMLP, is_compiled: bool, device: str) -> None:
    leaves, plan = drawn("random", device, DTYPES[device])
    rows_R, slots_SK, offsets_e = plan
    x_SD, scores_R, gate_up, down = leaves
    pieces = [
        *(w.detach()[:OWN].clone() for w in (gate_up, down)),
        *(w.detach()[OWN:].clone() for w in (gate_up, down)),
    ]
    pieces = [piece.requires_grad_() for piece in pieces]
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager") if is_compiled else mlp
    serve_with = partial(compiled, x_SD, rows_R, slots_SK, scores_R, offsets_e)
    in_two = saved_bytes(lambda: serve_with(*pieces), pieces)
    in_one = saved_bytes(lambda: serve_with(gate_up, down), [gate_up, down])
    assert in_two == in_one
    early = saved_bytes(
        lambda: serve_with(*(torch.cat(two) for two in zip(pieces[:2], pieces[2:], strict=True))), pieces
    )
    assert early > in_one, "weights that are joined outside are kept"
