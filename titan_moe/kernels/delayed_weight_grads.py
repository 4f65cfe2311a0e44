"""Weight gradients that are computed after a backward, when a schedule asks for them.

Nothing in a backward waits for weight gradients, so zero-bubble schedules (arXiv:2401.10241) compute them where a rank
would wait. In a forward that delays them, an operation reads stand-ins of its weights, leaves that end its graph. Its
backward computes the gradients of its inputs and keeps the operands of the rest. When these are computed, autograd goes
on from the weights as the layer read them, through casts and local tensors to the parameters. It does so in the order
of a whole backward, and gradients of several uses are added in that order: sums have the same bits.

Only operands stay between the two: they are detached, so they keep no part of the graph.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

WeightGrads = Callable[[], Sequence[Tensor | None]]
"""Computes the gradients of an operation's weights."""
_DELAYED: "WeakValueDictionary[int, DelayedWeightGrads]" = WeakValueDictionary()
_HANDLES = count(1)


class DelayedWeightGrads:
    """The weight gradients of one use of weights. Operations take tensors and numbers alone, and know it by its
    handle."""

    def __init__(self) -> None:
        self.pending: WeightGrads | None = None
        self.is_used = False
        self.handle = next(_HANDLES)
        _DELAYED[self.handle] = self

    @staticmethod
    def of(handle: int) -> "DelayedWeightGrads | None":
        """Those of a handle; None for 0."""
        return None if handle == 0 else _DELAYED[handle]

    def __call__(self, weight_grads: WeightGrads) -> None:
        """Take them over from the operation's backward."""
        self.pending = weight_grads

    def compute(self) -> Sequence[Tensor | None]:
        """Compute them, and free their operands."""
        weight_grads, self.pending = self.pending, None
        assert weight_grads is not None, "the rows' backward comes before the weights'"
        return weight_grads()


Delay = DelayedWeightGrads
"""Takes over from an operation's backward the computation of its weight gradients."""


class _Root(torch.autograd.Function):
    """A scalar that stands for a use of weights: its backward computes their gradients."""

    @staticmethod
    def forward(ctx: Any, grads: DelayedWeightGrads, *weights: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.zeros((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, unread: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.grads.compute()


class PendingWeightGrads:
    """The weight gradients that a backward leaves."""

    def __init__(self) -> None:
        self.uses: list[tuple[Tensor, DelayedWeightGrads]] = []

    def delay(self, *weights: Tensor) -> tuple[list[Tensor], Delay | None]:
        """For an operation that reads these weights: stand-ins to read, and what takes over their gradients.

        The operation returns None as gradients of stand-ins. Frozen weights have nothing to delay: -> as they are, and
        None.
        """
        if not any(weight.requires_grad for weight in weights):
            return list(weights), None
        grads = DelayedWeightGrads()
        self.uses.append((_Root.apply(grads, *weights), grads))
        return [weight.detach().requires_grad_(weight.requires_grad) for weight in weights], grads

    def compute(self) -> None:
        """Compute and accumulate them, after the backward; each is freed as soon as its parameter has it.

        Weights that the backward has not reached have none.
        """
        roots = [root for root, grads in self.uses if grads.pending is not None]
        self.uses = []
        if roots:
            torch.autograd.backward(roots, [roots[0].detach()] * len(roots))


class WeightGradQueue:
    """Tells operations whether their weight gradients are delayed; one for all stages of a rank."""

    def __init__(self) -> None:
        self._pending: PendingWeightGrads | None = None

    def __deepcopy__(self, memo: object) -> "WeightGradQueue":
        """A copied model uses the same queue."""
        return self

    @property
    def pending(self) -> PendingWeightGrads | None:
        """Where the forward under way leaves weight gradients; None if its backward is to compute them. A compiled
        graph has no side effects, so its backward computes its own."""
        return None if torch.compiler.is_compiling() else self._pending

    @contextmanager
    def delaying(self, pending: PendingWeightGrads | None = None) -> Iterator[PendingWeightGrads]:
        """Delay the weight gradients of a forward; with `pending`, those of another piece of it."""
        assert self._pending is None, "one forward at a time"
        self._pending = PendingWeightGrads() if pending is None else pending
        try:
            yield self._pending
        finally:
            self._pending = None
