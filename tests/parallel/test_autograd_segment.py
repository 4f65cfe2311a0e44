"""Autograd segments give the gradients of the unsplit function, whatever runs in between."""

import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.parallel.autograd_segment import AutogradSegment


class Flow(NamedTuple):
    """What the first segment passes to the second."""

    h: Tensor
    aside: tuple[Tensor, None, list[int]]
    ids: Tensor


def first(x: Tensor, weight: Tensor) -> tuple[Flow, Tensor]:
    unused = x.exp()
    return Flow(x @ weight, (x.sin(), None, [1, 2]), x.argsort(1)), unused


def second(flow: Flow, unused: Tensor, weight: Tensor) -> tuple[Tensor]:
    aside, nothing, sizes = flow.aside
    assert nothing is None and sizes == [1, 2]
    return ((flow.h @ weight + flow.h + aside.gather(1, flow.ids)).cos(),)


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]


def whole(grad: Tensor) -> list[Tensor]:
    x, weight, other = leaves()
    (y,) = second(*first(x, weight), other)
    y.backward(grad)
    return [y.detach(), x.grad, weight.grad, other.grad]


def test_autograd_segments_equal_the_unsplit_function() -> None:
    grad = torch.randn(4, 4, dtype=torch.float64)
    x, weight, other = leaves()
    one, two = AutogradSegment(lambda x: first(x, weight)), AutogradSegment(lambda *flow: second(*flow, other))
    flow = one(x)
    (y,) = two(*flow)
    of_flow = two.backward([grad])
    assert [g is None for g in of_flow] == [False, False, True, True, True, True, True], "h and the sine alone"
    assert x.grad is weight.grad is None, "the cut ends here"
    (of_x,) = one.backward(of_flow)
    assert x.grad is None, "the caller has the gradient"
    for actual, expected in zip([y, of_x, weight.grad, other.grad], whole(grad), strict=True):
        assert torch.equal(actual, expected)


def test_autograd_segment_returns_gradients_of_inputs_passed_through() -> None:
    x, weight, _ = leaves()
    piece = AutogradSegment(lambda x, y: (x, y * 2))
    piece(x, weight)
    grad = torch.ones_like(x)
    of_x, of_weight = piece.backward([grad, None])
    assert of_x.data_ptr() == grad.data_ptr() and of_weight is None


class Touched(TorchDispatchMode):
    """Records every operation that reads or writes certain memory."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.pointer, self.names = tensor.data_ptr(), []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if any(x.data_ptr() == self.pointer for x in tensors) and "detach" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Carry(torch.autograd.Function):
    """Half of a collective: forward and backward return buffers that must not be read yet."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize("is_strided", [False, True])
def test_autograd_segment_does_not_read_pending_tensors(is_strided: bool) -> None:
    x, *_ = leaves()
    one, two = AutogradSegment(lambda x: (Carry.apply(x), 1)), AutogradSegment(lambda x, one: (Carry.apply(x),))
    flow = one(x)
    two(*flow)
    grad = torch.randn(4, 4, dtype=torch.float64)
    grad = grad.T if is_strided else grad  # autograd copies what it collects, if it is strided
    with Touched(grad) as touched:
        grad_out, nothing = two.backward([grad])
        (of_x,) = one.backward([grad_out, nothing])
    assert touched.names == [] and nothing is None
    assert of_x.data_ptr() == grad.data_ptr() and of_x.stride() == grad.stride()


def test_autograd_segment_keeps_no_output() -> None:
    x, weight, _ = leaves()
    piece = AutogradSegment(lambda x: (x @ weight,))
    (output,) = piece(x)
    output = weakref.ref(output)
    assert output() is None
    piece.backward([torch.ones(4, 4, dtype=torch.float64)])
    assert weight.grad is not None
