"""Gradient accumulation in Triton: PyTorch's bits, for any size, offset and stride."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.optim import accumulate as accumulate_file
from titan_moe.kernels.optim.accumulate import BLOCK, accumulate, accumulate_reference, launch_accumulate

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(), (0, 4), (1,), (3, 5, 7), (BLOCK,), (2, BLOCK + 8), (3 * BLOCK + 1,)]


def draw_tensors(
    shape: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """A total and an addend, spread over the exponents, with zeros, infinities and denormals among them."""
    torch.manual_seed(0)
    digits, exponents = (torch.randn(2, *shape, device=device) for _ in range(2))
    total, addend = (digits * exponents.mul(9).exp2()).unbind()
    tiny = 1e-40 if device == "cuda" else 2e-38  # Triton's interpreter flushes bf16 denormals
    edges = torch.tensor([0.0, -0.0, torch.inf, tiny, -tiny, 3e38], device=device)
    if total.numel() > 100:
        total.view(-1)[:36], addend.view(-1)[:36] = edges.repeat(6), edges.repeat_interleave(6)
    return total.clone(), addend.to(dtype, copy=True)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def check(total: Tensor, addend: Tensor, is_first: bool, op: Callable[..., object] = launch_accumulate) -> None:
    """`op` gives the reference's bits and does not change the addend."""
    expected, before = accumulate_reference(total.clone(), addend, is_first), addend.clone()
    if is_first:
        total.fill_(torch.nan)
    op(total, addend, is_first)
    assert torch.equal(bits(total), bits(expected)) and torch.equal(addend, before)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_triton_accumulate_equals_pytorch_bitwise(device: str, dtype: torch.dtype, is_first: bool) -> None:
    for shape in SHAPES:
        check(*draw_tensors(shape, device, dtype), is_first)


@pytest.mark.parametrize("device", DEVICES)
def test_triton_accumulate_of_a_slice_writes_nothing_outside_it(device: str) -> None:
    for start in (1, 3, 4, 8):
        memory, addends = draw_tensors((BLOCK + 99,), device)
        before, own = memory.clone(), slice(start, start + BLOCK + 16)
        check(memory[own], addends[start : start + BLOCK + 16], False)
        assert torch.equal(bits(memory[:start]), bits(before[:start]))
        assert torch.equal(bits(memory[own.stop :]), bits(before[own.stop :]))


def test_accumulate_keeps_the_dtype_of_the_total() -> None:
    for total_dtype in (torch.float64, torch.float32, torch.bfloat16):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            total, addend = torch.randn(9, 4).to(total_dtype), torch.randn(9, 4).to(dtype)
            expected = total + addend.to(torch.promote_types(total_dtype, dtype))
            accumulate(total, addend)
            assert total.dtype == total_dtype and torch.equal(total, expected.to(total_dtype))
            accumulate(total, addend, True)
            assert torch.equal(total, addend.to(total_dtype))


def test_accumulate_refuses_shapes_that_broadcast() -> None:
    with pytest.raises(ValueError, match=r"the total has \[2, 3\], the addend \[3\]"):
        accumulate(torch.zeros(2, 3), torch.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("is_first", [False, True])
def test_accumulate_launches_triton_for_contiguous_bf16_into_fp32(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton adds contiguous bf16 to contiguous fp32, PyTorch the rest."""
    launched: list[Tensor] = []

    def launch(total: Tensor, addend: Tensor, is_first: bool) -> None:
        launched.append(total)
        launch_accumulate(total, addend, is_first)

    monkeypatch.setattr(accumulate_file, "launch_accumulate", launch)
    for shape in SHAPES:
        check(*draw_tensors(shape, "cuda"), is_first, accumulate)
    assert len(launched) == len(SHAPES)
    total, addend = draw_tensors((64, 48), "cuda")
    check(total, addend.view(48, 64).T, is_first, accumulate)
    check(total.view(48, 64).T, addend, is_first, accumulate)
    check(*draw_tensors((64, 48), "cuda", torch.float32), is_first, accumulate)
    assert len(launched) == len(SHAPES)


@pytest.mark.gpu
def test_captured_accumulate_reads_new_gradients_at_each_replay() -> None:
    total, addend = draw_tensors((5 * BLOCK + 3,), "cuda")
    expected = torch.empty_like(total)
    for is_first in (True, False):  # compile before the capture
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
def test_accumulate_of_more_than_2_31_elements() -> None:
    num_elements, chunk = 2**31 + 3 * BLOCK + 16, 2**27
    total = torch.full((num_elements,), torch.nan, device="cuda")
    addend = torch.empty(num_elements, device="cuda", dtype=torch.bfloat16).normal_()
    for is_first, factor in ((True, 1), (False, 2)):
        accumulate(total, addend, is_first)
        for own, added in zip(total.split(chunk), addend.split(chunk), strict=True):
            assert torch.equal(own, factor * added.float())
