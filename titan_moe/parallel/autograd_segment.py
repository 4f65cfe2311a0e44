"""Cutting autograd: a piece of a computation whose backward runs when it is called for."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree


class _GradientCut(torch.autograd.Function):
    """Where a piece begins: identity whose backward leaves the gradients in a list and goes no further.

    No leaf tensor collects them instead: a gradient may be a message that still travels, and to collect is to read, or
    to copy. `anchor` requires a gradient, so that there is a backward at all.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, grads: list[Tensor | None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.grads = grads
        ctx.set_materialize_grads(False)  # what was not used has no gradient
        return tuple(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.grads[:] = grads
        return (None,) * (2 + len(grads))


class Piece:
    """Runs a function once, and its backward once, later, whatever runs in between.

    Inputs and outputs are pytrees; what in them needs no gradient passes as it is. Outputs are not kept: only their
    ends of the graph are, and what autograd has saved. Tensors in flight pass both ways untouched, if the function uses
    each of them once.

    Example:
        >>> import torch
        >>> double = Piece(lambda x: (2 * x,))
        >>> (y,) = double(torch.ones(2, requires_grad=True))
        >>> double.backward([torch.ones(2)])
        [tensor([2., 2.])]
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.ends: list[GradientEdge | None] = []
        """By leaf of the outputs."""
        self.num_inputs = 0
        self.places: list[int] = []
        """Leaves of the inputs that need gradients."""
        self.grads: list[Tensor | None] = []
        """Theirs, once backward has run."""

    def __call__(self, *inputs: Any) -> Any:
        leaves, layout = pytree.tree_flatten(inputs)
        self.num_inputs = len(leaves)
        self.places = [place for place, leaf in enumerate(leaves) if _needs_grad(leaf)]
        self.grads = [None] * len(self.places)
        if self.places:
            anchor = torch.empty(0, requires_grad=True)
            fresh = _GradientCut.apply(anchor, self.grads, *(leaves[place].detach() for place in self.places))
            for place, leaf in zip(self.places, fresh, strict=True):
                leaves[place] = leaf
        outputs = self.function(*pytree.tree_unflatten(leaves, layout))
        self.ends = [get_gradient_edge(leaf) if _needs_grad(leaf) else None for leaf in pytree.tree_leaves(outputs)]
        return outputs

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the outputs -> those of the inputs, by leaf; None where there is none."""
        ends = [(end, grad) for end, grad in zip(self.ends, grads, strict=True) if end and grad is not None]
        torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])
        of_inputs: list[Tensor | None] = [None] * self.num_inputs
        for place, grad in zip(self.places, self.grads, strict=True):
            of_inputs[place] = grad
        self.ends, self.grads = [], []
        return of_inputs


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
