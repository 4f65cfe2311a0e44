"""How many slots a rank lays out for its experts, and rows it has room for, where other ranks' routing decides it and
the host must not ask.

The worst case, every row of the group choosing experts of one rank, is as many times the balanced load as there are
ranks. Permutation for all of it would be safe, and mostly empty. A bound of a small factor times the balanced load
(Megatron's expert-rank capacity factor) makes sizes static and small. Nothing is ever dropped for it: rows and choices
that do not fit raise a flag on the device, the optimizer step that they belong to changes nothing, and is taken again
without the bound, at the sizes that the host then reads.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

SLOTS_ALIGNMENT = 128
"""Slots are laid out in whole tiles of the expert kernels, and rows in as many."""


class ExpertCapacity:
    """The bound of all layers of a model, and whether any of them has met it.

    Args:
        capacity_factor: slots of a rank over its balanced load, and rows over those that random routing sends it; 0
            lays out the worst case, which nothing overflows.
    """

    def __init__(self, capacity_factor: float = 0.0, device: torch.device | str = "cpu") -> None:
        self.capacity_factor = capacity_factor
        self.is_unbounded = False
        self.overflowed = torch.zeros((), dtype=torch.bool, device=device)
        """On the device: whether something found no room since `reset`. Set anew by a forward that is repeated, to
        the same."""
        self.failed: Tensor | None = None
        """On the device, where exchanges can fail: not 0 once one has."""
        self.check: Callable[[], None] = _nothing
        """Raises what made it fail; reads nothing on the device."""

    @property
    def is_suspended(self) -> bool:
        """Whether there is a bound, and it does not hold for now."""
        return self.capacity_factor > 0 and self.is_unbounded

    @property
    def is_bounded(self) -> bool:
        """Whether a step's result must be looked at before it counts."""
        return self.capacity_factor > 0 and not self.is_unbounded

    @property
    def reads_sizes_on_host(self) -> bool:
        """Whether the host reads sizes: where a bound does not hold for now, unless a compiler looks for one graph."""
        return self.is_suspended and not torch.compiler.is_compiling()

    def num_slots(self, ids_SK: Tensor, balanced: float, worst: int) -> int:
        """Slots to lay out for choices, -1 where there is none, from those of a balanced load and of the worst."""
        return int((ids_SK >= 0).sum()) if self.reads_sizes_on_host else self._bounded(balanced, worst)

    def num_rows(self, expected: float, worst: int) -> int:
        """Rows to make room for, from those that random routing sends and those of the worst case."""
        return self._bounded(expected, worst)

    def _bounded(self, expected: float, worst: int) -> int:
        if not self.is_bounded:
            return worst
        wanted = math.ceil(expected * self.capacity_factor / SLOTS_ALIGNMENT) * SLOTS_ALIGNMENT
        return min(wanted, worst)

    @property
    def invalidates_step(self) -> Tensor:
        """On the device: whether the step that is under way must change nothing."""
        return self.overflowed if self.failed is None else self.overflowed | (self.failed[0] != 0)

    def reset(self) -> None:
        """Forget what overflowed."""
        self.overflowed.zero_()

    def book(self, overflowed: Tensor) -> None:
        """Remember that a layer's rows or choices did not fit, if they did not."""
        self.overflowed.logical_or_(overflowed)

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """Make room for what comes, whatever the routing, for a while: exact, and the host waits for each size."""
        was_unbounded, self.is_unbounded = self.is_unbounded, True
        try:
            yield
        finally:
            self.is_unbounded = was_unbounded


def _nothing() -> None:
    """No exchange can fail."""
