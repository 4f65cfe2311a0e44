"""Gradients added in Triton: PyTorch's bits, whatever the sizes and wherever they lie."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from titan_moe.kernels import accumulate as accumulate_file
from titan_moe.kernels.optim.accumulate import BLOCK, accumulate, accumulate_reference, launch_accumulate

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(), (0, 4), (1,), (3, 5, 7), (BLOCK,), (2, BLOCK + 8), (3 * BLOCK + 1,)]


def drawn(shape: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """A total and an addend, their sizes spread over the exponents, with what is not a plain number among them."""
    torch.manual_seed(0)
    digits, exponents = (torch.randn(2, *shape, device=device) for _ in range(2))
    total, addend = (digits * exponents.mul(9).exp2()).unbind()
    tiny = 1e-40 if device == "cuda" else 2e-38  # of bf16 Triton's interpreter flushes what is denormal
    edges = torch.tensor([0.0, -0.0, torch.inf, tiny, -tiny, 3e38], device=device)
    if total.numel() > 100:
        total.view(-1)[:36], addend.view(-1)[:36] = edges.repeat(6), edges.repeat_interleave(6)
    return total.clone(), addend.to(dtype, copy=True)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def check(total: Tensor, addend: Tensor, is_first: bool, op: Callable[..., object] = launch_accumulate) -> None:
    """`op` leaves the reference's bits, and the addend as it was."""
    expected, before = accumulate_reference(total.clone(), addend, is_first), addend.clone()
    if is_first:
        total.fill_(torch.nan)
    op(total, addend, is_first)
    assert torch.equal(bits(total), bits(expected)) and torch.equal(addend, before)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_accumulate_in_triton_leaves_pytorchs_bits(device: str, dtype: torch.dtype, is_first: bool) -> None:
    for shape in SHAPES:
        check(*drawn(shape, device, dtype), is_first)


@pytest.mark.parametrize("device", DEVICES)
def test_accumulate_in_triton_writes_nothing_beside_a_total_that_lies_anywhere(device: str) -> None:
    for start in (1, 3, 4, 8):
        memory, addends = drawn((BLOCK + 99,), device)
        before, own = memory.clone(), slice(start, start + BLOCK + 16)
        check(memory[own], addends[start : start + BLOCK + 16], False)
        assert torch.equal(bits(memory[:start]), bits(before[:start]))
        assert torch.equal(bits(memory[own.stop :]), bits(before[own.stop :]))


def test_a_total_keeps_its_dtype_and_takes_any_other() -> None:
    for total_dtype in (torch.float64, torch.float32, torch.bfloat16):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            total, addend = torch.randn(9, 4).to(total_dtype), torch.randn(9, 4).to(dtype)
            expected = total + addend.to(torch.promote_types(total_dtype, dtype))
            accumulate(total, addend)
            assert total.dtype == total_dtype and torch.equal(total, expected.to(total_dtype))
            accumulate(total, addend, True)
            assert torch.equal(total, addend.to(total_dtype))


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[2, 3\] takes no addend of shape \[3\]"):
        accumulate(torch.zeros(2, 3), torch.ones(3))


def test_the_custom_op_is_sound() -> None:
    for is_first in (False, True):
        args = (torch.randn(6, 3), torch.randn(6, 3).bfloat16(), is_first)
        torch.library.opcheck(
            torch.ops.titan_moe.accumulate.default, args, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.gpu
@pytest.mark.parametrize("is_first", [False, True])
def test_what_the_gpu_runs(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes bf16 onto fp32 where both lie flat, PyTorch the rest."""
    launched: list[Tensor] = []

    def launch(total: Tensor, addend: Tensor, is_first: bool) -> None:
        launched.append(total)
        launch_accumulate(total, addend, is_first)

    monkeypatch.setattr(accumulate_file, "launch_accumulate", launch)
    for shape in SHAPES:
        check(*drawn(shape, "cuda"), is_first, accumulate)
    assert len(launched) == len(SHAPES)
    total, addend = drawn((64, 48), "cuda")
    check(total, addend.view(48, 64).T, is_first, accumulate)
    check(total.view(48, 64).T, addend, is_first, accumulate)
    check(*drawn((64, 48), "cuda", torch.float32), is_first, accumulate)
    assert len(launched) == len(SHAPES)


@pytest.mark.gpu
def test_a_graph_adds_anew_at_every_replay() -> None:
    total, addend = drawn((5 * BLOCK + 3,), "cuda")
    expected = torch.empty_like(total)
    for is_first in (True, False):  # compiled before anything is recorded
        accumulate(torch.empty_like(total), addend, is_first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accumulate(total, addend, True)
        accumulate(total, addend)
    for seed in range(3):
        torch.manual_seed(seed)
        addend.normal_()
        graph.replay()
        accumulate_reference(expected, addend, True)
        accumulate_reference(expected, addend)
        assert torch.equal(total, expected)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts() -> None:
    num_elements, chunk = 2**31 + 3 * BLOCK + 16, 2**27
    total = torch.full((num_elements,), torch.nan, device="cuda")
    addend = torch.empty(num_elements, device="cuda", dtype=torch.bfloat16).normal_()
    for is_first, factor in ((True, 1), (False, 2)):
        accumulate(total, addend, is_first)
        for own, added in zip(total.split(chunk), addend.split(chunk), strict=True):
            assert torch.equal(own, factor * added.float())
