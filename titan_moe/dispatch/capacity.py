"""Expert capacity: how many slots and rows a rank has room for, where sizes depend on routing and must be static.

S rows received · K experts a token

In the worst case all rows of the group are routed to one rank: P times the balanced load for P ranks, mostly empty. A
small factor times the balanced load (Megatron's expert-rank capacity factor) makes sizes static and small, without a
host read. No token is dropped: rows and assignments that do not fit set a flag on the device, and the optimizer step is
skipped and repeated without the bound, at sizes that the host reads.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

SLOTS_ALIGNMENT = 128
"""Numbers of slots and rows are multiples of a tile of the expert kernels."""


class ExpertCapacity:
    """The capacity of all layers of a model, and whether any layer has overflowed.

    Args:
        capacity_factor: slots of a rank over its balanced load, and rows over those that random routing sends it; 0
            means the worst case, which cannot overflow.
    """

    def __init__(self, capacity_factor: float = 0.0, device: torch.device | str = "cpu") -> None:
        self.capacity_factor = capacity_factor
        self.is_unbounded = False
        self.overflowed = torch.zeros((), dtype=torch.bool, device=device)
        """On the device: whether a layer has overflowed since `reset`. A recomputed forward sets it again, alike."""
        self.failed: Tensor | None = None
        """On the device, where exchanges can fail: not 0 once one has failed."""
        self.check: Callable[[], None] = lambda: None
        """Raise the error of a failed exchange. Reads nothing on the device."""

    @property
    def is_suspended(self) -> bool:
        """Whether there is a bound that is lifted for now (`unbounded`)."""
        return self.capacity_factor > 0 and self.is_unbounded

    @property
    def is_bounded(self) -> bool:
        """Whether a step may overflow, so that `overflowed` must be checked."""
        return self.capacity_factor > 0 and not self.is_unbounded

    @property
    def reads_sizes_on_host(self) -> bool:
        """Whether the host reads sizes: while a bound is lifted, except under the compiler, whose graph is static."""
        return self.is_suspended and not torch.compiler.is_compiling()

    def num_slots(self, ids_SK: Tensor, balanced: float, worst: int) -> int:
        """Number of slots for these assignments (-1 for none), given those of a balanced load and of the worst case."""
        return int((ids_SK >= 0).sum()) if self.reads_sizes_on_host else self.num_rows(balanced, worst)

    def num_rows(self, expected: float, worst: int) -> int:
        """Number of rows to allocate, given those that random routing sends and those of the worst case."""
        if not self.is_bounded:
            return worst
        bounded = math.ceil(expected * self.capacity_factor / SLOTS_ALIGNMENT) * SLOTS_ALIGNMENT
        return min(bounded, worst)

    @property
    def invalidates_step(self) -> Tensor:
        """On the device: whether the current step must be skipped."""
        return self.overflowed if self.failed is None else self.overflowed | (self.failed[0] != 0)

    def reset(self) -> None:
        """Clear the overflow flag."""
        self.overflowed.zero_()

    def record_overflow(self, overflowed: Tensor) -> None:
        """Record a layer's overflow flag, if there is a bound."""
        if self.is_bounded:
            self.overflowed.logical_or_(overflowed)

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """Lift the bound within a `with` block: sizes are exact, and the host waits for each of them."""
        was_unbounded, self.is_unbounded = self.is_unbounded, True
        try:
            yield
        finally:
            self.is_unbounded = was_unbounded
