"""Autograd segments: a part of a computation whose backward runs when it is called."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree


class _GradientCut(torch.autograd.Function):
    """The start of a segment: identity whose backward stores the gradients in a list and stops.

    Leaf tensors would read or copy gradients to accumulate them, and a gradient may be the buffer of a pending
    collective. `anchor` requires a gradient, so that autograd calls this backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, grads: list[Tensor | None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.grads = grads
        ctx.set_materialize_grads(False)  # an unused input has no gradient
        return tuple(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.grads[:] = grads
        return (None,) * (2 + len(grads))


class AutogradSegment:
    """Runs a function once, and its backward once, later.

    Inputs and outputs are pytrees; leaves that need no gradient pass unchanged. A segment keeps the graph's edges and
    what autograd saved, but no outputs. Buffers of pending collectives pass forward and backward unread, if the
    function uses each once.

    Example:
        >>> import torch
        >>> double = AutogradSegment(lambda x: (2 * x,))
        >>> (y,) = double(torch.ones(2, requires_grad=True))
        >>> double.backward([torch.ones(2)])
        [tensor([2., 2.])]
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.edges: list[GradientEdge | None] = []  # by leaf of the outputs
        self.num_inputs = 0
        self.indices: list[int] = []  # input leaves that need gradients
        self.grads: list[Tensor | None] = []  # of these leaves, once backward has run

    def __call__(self, *inputs: Any) -> Any:
        leaves, layout = pytree.tree_flatten(inputs)
        self.num_inputs = len(leaves)
        self.indices = [index for index, leaf in enumerate(leaves) if _needs_grad(leaf)]
        self.grads = [None] * len(self.indices)
        if self.indices:
            anchor = torch.empty(0, requires_grad=True)
            cut = _GradientCut.apply(anchor, self.grads, *(leaves[index].detach() for index in self.indices))
            for index, leaf in zip(self.indices, cut, strict=True):
                leaves[index] = leaf
        outputs = self.function(*pytree.tree_unflatten(leaves, layout))
        self.edges = [get_gradient_edge(leaf) if _needs_grad(leaf) else None for leaf in pytree.tree_leaves(outputs)]
        return outputs

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the outputs -> those of the inputs, by leaf; None where there is none."""
        pairs = [(edge, grad) for edge, grad in zip(self.edges, grads, strict=True) if edge and grad is not None]
        if pairs:  # else nothing in it trains
            torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        input_grads: list[Tensor | None] = [None] * self.num_inputs
        for index, grad in zip(self.indices, self.grads, strict=True):
            input_grads[index] = grad
        self.edges, self.grads = [], []
        return input_grads


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
