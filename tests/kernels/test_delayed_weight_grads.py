"""Weight gradients computed after a backward are those of a whole backward, bit for bit."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.config.formats import GemmFormats
from titan_moe.kernels.choose import (
    QUEUED_GROUPED_GEMM,
    QUEUED_SWIGLU_DOWN,
    SWIGLU_DOWN,
    choose_expert_mlp,
    choose_queued_expert_mlp,
)
from titan_moe.kernels.delayed_weight_grads import WeightGradQueue
from titan_moe.kernels.experts.composite_mlp import CompositeMLP
from titan_moe.kernels.experts.grouped_mm import grouped_mm_reference
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.kernels.formats.grouped import emulated_grouped_mm
from titan_moe.kernels.linear.delayed import queued_linear

ROWS, WIDTH, HIDDEN, EXPERTS = 8, 8, 4, 3
NAMES = ("gate_up", "down", "gate_up_bias", "down_bias")
OFFSETS_E = torch.tensor([3, 3, 8], dtype=torch.int32)


class Case(NamedTuple):
    """An operation without and with a queue, and the shapes of what it reads; the first is its input."""

    whole: Callable[..., Tensor]
    queued: Callable[[WeightGradQueue], Callable[..., Tensor]]
    shapes: tuple[tuple[int, ...], ...]
    delayed: tuple[int, ...]  # of these the gradient is delayed
    dtype: torch.dtype = torch.float64


def experts_case(choice: str, score_on: str, dtype: torch.dtype) -> Case:
    mlp = choose_expert_mlp(choice, score_on)

    def with_weights(mlp: Any) -> Callable[..., Tensor]:
        def op(x_SD: Tensor, scores_R: Tensor, *weights: Tensor) -> Tensor:
            rows_R = torch.tensor([0, 2, 1, 3, 0, 2, 1, 0], dtype=torch.int32)
            slots_SK = torch.tensor([[0, 4, 7], [2, 6, -1], [1, 5, -1], [3, -1, -1]], dtype=torch.int32)
            return mlp(x_SD, ExpertSlots(rows_R, slots_SK, scores_R, OFFSETS_E), ExpertWeights.of(weights, NAMES))

        return op

    def queued(queue: WeightGradQueue) -> Callable[..., Tensor]:
        return with_weights(choose_queued_expert_mlp(mlp, queue))

    weights = (EXPERTS, 2, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, 2, HIDDEN), (EXPERTS, WIDTH)
    return Case(with_weights(mlp), queued, ((4, WIDTH), (ROWS,), *weights), (2, 3), dtype)


CASES = {
    "linear": Case(
        F.linear,
        lambda queue: partial(queued_linear, queue=queue),
        ((2, 3, WIDTH), (HIDDEN, WIDTH), (HIDDEN,)),
        (1,),
    ),
    "swiglu_down": Case(
        SWIGLU_DOWN["reference"], QUEUED_SWIGLU_DOWN[SWIGLU_DOWN["reference"]], ((2, 3, 8), (WIDTH, HIDDEN)), (1,)
    ),
    "experts_reference": experts_case("reference", "activation", torch.float64),
    "experts_reference_weighed_input": experts_case("reference", "input", torch.float64),
    "experts_grouped_mm": experts_case("grouped_mm", "activation", torch.float32),
}


def run(case: Case, frozen: tuple[int, ...] = (), *, delays: bool) -> list[Tensor | None]:
    """The output and the gradients of all that an operation reads twice, with different values, through casts."""
    generator, queue = torch.Generator().manual_seed(0), WeightGradQueue()
    leaves = [torch.randn(shape, generator=generator, dtype=case.dtype) for shape in case.shapes]
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index not in frozen)
    op = case.queued(queue) if delays else case.whole
    with queue.delaying() as pending:
        read = [leaf.to(torch.float32).to(case.dtype) for leaf in leaves]
        y = op(*read) + op(*(2 * x for x in read))
    y.sin().sum().backward()
    late = case.delayed if delays else ()
    assert [leaf.grad is None for leaf in leaves] == [
        index in late or not leaf.requires_grad for index, leaf in enumerate(leaves)
    ]
    pending.compute()
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_a_whole_backward(name: str) -> None:
    case = CASES[name]
    for one, other in zip(run(case, delays=True), run(case, delays=False), strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize("name", CASES)
def test_frozen_tensors_have_no_gradients_and_stop_none(name: str) -> None:
    case = CASES[name]
    for index in range(len(case.shapes)):
        delayed, whole = (run(case, (index,), delays=delays) for delays in (True, False))
        assert delayed[index + 1] is None
        torch.testing.assert_close(delayed, whole, rtol=0, atol=0)


def test_an_output_without_gradient_leaves_none_to_its_weights() -> None:
    queue = WeightGradQueue()
    x, used, unused = (torch.randn(2, 2, requires_grad=True) for _ in range(3))
    with queue.delaying() as pending:
        y, _ = (queued_linear(x, weight, None, queue) for weight in (used, unused))
    y.sum().backward()
    pending.compute()
    assert used.grad is not None and unused.grad is None


class Marked(torch.autograd.Function):
    """Identity, whose part of a graph is seen: it has an object that lives as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Any) -> Tensor:
        ctx.mark = mark
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize("name", CASES)
def test_only_operands_outlive_a_backward(name: str) -> None:
    case, queue = CASES[name], WeightGradQueue()
    marks = [set[int](), set[int]()]
    graph = [weakref.ref(mark) for mark in marks]
    x, *others = (torch.randn(shape, dtype=case.dtype).requires_grad_() for shape in case.shapes)
    with queue.delaying() as pending:
        y = Marked.apply(case.queued(queue)(Marked.apply(x.exp(), marks.pop()), *others), marks.pop())
    y.sum().backward()
    del y
    assert [mark() for mark in graph] == [None, None]
    operands = [weakref.ref(grads.pending) for _, grads in pending.uses if grads.pending is not None]
    assert len(operands) == len(case.delayed)
    pending.compute()
    assert all(ref() is None for ref in operands) and all(other.grad is not None for other in others)


def test_operands_and_gradients_are_freed_one_by_one() -> None:
    queue, grads, most_alive, num_left = WeightGradQueue(), [], [], []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight.view_as(weight)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            grads.append(weakref.ref(grad))
            most_alive.append(sum(ref() is not None for ref in grads))
            num_left.append(sum(use.pending is not None for _, use in uses))

    with queue.delaying() as pending:
        x = torch.randn(2, 3, requires_grad=True)
        for _ in range(4):
            x = queued_linear(x, Look.apply(torch.randn(3, 3, requires_grad=True)), None, queue)
    x.sum().backward()
    uses = pending.uses
    pending.compute()
    assert most_alive == [1, 1, 1, 1] and num_left == [3, 2, 1, 0] and pending.uses == []


def test_a_graph_delays_nothing() -> None:
    torch._dynamo.reset()  # all compiled partials share the limit of one function
    queue, weight = WeightGradQueue(), torch.randn(3, 3, requires_grad=True)
    compiled = torch.compile(partial(queued_linear, queue=queue), fullgraph=True, backend="aot_eager")
    with queue.delaying() as pending:
        compiled(torch.randn(2, 3), weight, None).sum().backward()
    assert pending.uses == [] and weight.grad is not None


def test_experts_in_emulated_formats_are_not_queued() -> None:
    formats = GemmFormats("fp8_rowwise", "fp8_rowwise", "fp8_rowwise")
    for gemm in (emulated_grouped_mm(formats), grouped_mm_reference):
        assert choose_queued_expert_mlp(CompositeMLP(gemm), WeightGradQueue()) is None


@pytest.mark.parametrize("choice", ["grouped_mm", "reference"])
def test_clones_are_not_delayed(choice: str) -> None:
    queue = WeightGradQueue()
    x_RI, own_eOI, clones_cOI = (torch.randn(shape, requires_grad=True) for shape in ((ROWS, 4), (2, 4, 4), (1, 4, 4)))
    with queue.delaying() as pending:
        QUEUED_GROUPED_GEMM[choice](queue)(x_RI, own_eOI, clones_cOI, OFFSETS_E).sum().backward()
    assert pending.uses == [] and own_eOI.grad is not None and clones_cOI.grad is not None
