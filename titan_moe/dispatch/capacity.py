"""Expert capacity: the numbers of rows and slots that a rank allocates, if sizes depend on routing but must be static.

S rows received · K experts a token

In the worst case all rows of the group are routed to one rank: P times the balanced load for P ranks, mostly empty. A
factor times the balanced load (Megatron's expert-rank capacity factor) makes sizes static and small, without a host
read. No token is dropped: a step that does not fit sets a flag on the device, changes nothing, and is repeated with the
bound lifted.

Without an arena the factor bounds the rows and slots of each layer; while the bound is lifted, the host reads exact
sizes. With an arena (kernels/experts/arena.py) the factor bounds the sum over the layers of a microbatch. While that
bound is lifted, nothing is kept: backward gets the rows and computes the hidden states of a layer again, and the host
reads no size.

With an arena another factor bounds the rows and slots of each layer, for which its temporaries have room; without it
they have the size of the worst case. While this bound is lifted, a layer takes the tokens of a rank in pieces, one
after the other, so few at a time that their rows and slots have the same room wherever they are routed. So
temporaries have the same room, and the host reads no size; but backward needs the assignments of all pieces, 8 bytes a
slot and 4 K bytes a row, which add up to those of the worst case. A token's result and gradient are those of all tokens
at once, bit for bit if a GEMM gives a row the same bits among any others; weight gradients are summed over the pieces.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from titan_moe.kernels.experts.arena import NONE, Arena
from titan_moe.plan.cost.loads import SLOTS_ALIGNMENT, LayerLoads, aligned


class ExpertCapacity:
    """The capacity of all layers of a model, and whether any layer has overflowed.

    Args:
        capacity_factor: slots of a rank over its balanced load, and rows over those that random routing sends it; 0
            means the worst case, which cannot overflow.
        layer_factor: the same of each layer, where there is an arena.
    """

    def __init__(
        self, capacity_factor: float = 0.0, device: torch.device | str = "cpu", layer_factor: float = 0.0
    ) -> None:
        self.capacity_factor, self.layer_factor = capacity_factor, layer_factor
        self.is_unbounded = False
        self.num_resizes = 0
        self.arena: Arena | None = None
        self.loads: LayerLoads | None = None
        """Those of the arena, with the bound of each layer."""
        self.worst_loads: LayerLoads | None = None
        """The same without it."""
        self.num_layer_resizes = 0
        self.slab = 0
        """Of the arena, where the next forward is written; set by `writing_to`."""
        self.balanced = torch.ones(2, dtype=torch.float64, device=device)
        """Rows and slots of a balanced load of all layers of a slab, where there is an arena."""
        self.overflowed = torch.zeros((), dtype=torch.bool, device=device)
        """On the device: whether a layer has overflowed since `reset`. A recomputed forward sets it again, alike."""
        self.need = torch.zeros((), dtype=torch.float32, device=device)
        """On the device: the largest factor that a layer has needed since `reset`; without an arena."""
        self.failed: Tensor | None = None
        """On the device, where exchanges can fail: not 0 once one has failed."""
        self.check: Callable[[], None] = _none_failed
        """Raise the error of a failed exchange. Reads nothing on the device."""

    def use_arena(self, arena: Arena, loads: LayerLoads) -> None:
        """Bound what all layers together keep for backward, in each slab of this arena. `loads` are of the stage that
        has the most layers on this rank, perhaps none."""
        self.arena, self.worst_loads = arena, loads
        self.balanced.copy_(torch.tensor(loads.of_all_layers()).clamp(min=1))
        self._bound_layers(self.layer_factor)

    def resize_layers(self, layer_factor: float) -> None:
        """Set the factor of each layer, which compiled graphs have: the caller drops them."""
        self.num_layer_resizes += 1
        self._bound_layers(layer_factor)

    def _bound_layers(self, layer_factor: float) -> None:
        assert self.worst_loads is not None, "an arena bounds layers"
        self.loads = self.worst_loads.bounded(layer_factor)
        self.layer_factor = 0.0 if self.loads == self.worst_loads else layer_factor  # what bounds nothing is none
        self.resize(self.capacity_factor)

    def resize(self, capacity_factor: float) -> None:
        """Set the factor, and the size of the arena: 0 leaves room for one layer, and nothing is kept for backward."""
        self.capacity_factor = capacity_factor
        self.num_resizes += 1
        if self.arena is not None and self.loads is not None:
            factor = 0.0 if self.arena.is_checkpointed else capacity_factor
            self.arena.keeps = factor > 0
            self.arena.resize(*self.loads.room(factor))

    @property
    def arena_handle(self) -> int:
        """The handle of the arena, for operations."""
        return NONE if self.arena is None else self.arena.handle

    # the arena is asked first: what a compiler traces must not depend on a factor that changes

    @property
    def is_suspended(self) -> bool:
        """Whether there is a bound on each layer that is lifted for now (`unbounded`)."""
        return self.arena is None and self.capacity_factor > 0 and self.is_unbounded

    @property
    def is_bounded(self) -> bool:
        """Whether a step may overflow, so that its flag must be read."""
        if self.is_unbounded:
            return False
        return self.bounds_all_layers or self.bounds_each_layer

    @property
    def bounds_all_layers(self) -> bool:
        """Whether the capacity factor can be too small: not if recompute keeps nothing in the arena."""
        return self.capacity_factor > 0 and not (self.arena is not None and self.arena.is_checkpointed)

    @property
    def bounds_each_layer(self) -> bool:
        """Whether layers of an arena have less room than in the worst case."""
        return self.arena is not None and self.layer_factor > 0

    @property
    def takes_pieces(self) -> bool:
        """Whether layers take tokens in pieces: while their bound in an arena is lifted."""
        return self.bounds_each_layer and self.is_unbounded

    @property
    def reads_sizes_on_host(self) -> bool:
        """Whether the host reads sizes: while a bound is lifted, except under the compiler, whose graph is static."""
        return self.is_suspended and not torch.compiler.is_compiling()

    @property
    def sizes(self) -> tuple[int, bool]:
        """What the sizes in a compiled graph depend on, beside the batch: how often the factor of each layer was set,
        and whether that bound is lifted. Graphs are dropped whenever it is set."""
        if self.arena is None:
            return self.num_resizes, self.is_suspended
        return self.num_layer_resizes, self.takes_pieces

    def num_slots(self, ids_SK: Tensor, balanced: float, worst: int) -> int:
        """Number of slots for these assignments (-1 for none), given those of a balanced load and of the worst case."""
        return int((ids_SK >= 0).sum()) if self.reads_sizes_on_host else self.num_rows(balanced, worst)

    def num_rows(self, expected: float, worst: int) -> int:
        """Number of rows to allocate, given those that random routing sends and those of the worst case."""
        factor = self.capacity_factor if self.arena is None else self.layer_factor
        return worst if not factor or self.is_unbounded else self._bounded(expected * factor, worst)

    def _bounded(self, number: float, worst: int) -> int:
        return min(aligned(number, SLOTS_ALIGNMENT), worst)

    def tokens_at_a_time(self, num_tokens: int, rows: tuple[float, int], slots: tuple[float, int]) -> int:
        """Of how many of a rank's tokens the rows and slots have room within the bound of a layer, wherever they are
        routed, in equal pieces; all tokens unless pieces are taken. `rows` and `slots` are expected numbers and those
        of the worst case."""
        if not self.takes_pieces or not num_tokens:
            return num_tokens
        room = (num_tokens * self._bounded(one * self.layer_factor, worst) // worst for one, worst in (rows, slots))
        num_pieces = -(-num_tokens // max(min(room), 1))
        return -(-num_tokens // num_pieces)

    @property
    def invalidates_step(self) -> Tensor:
        """On the device: whether the current step must be skipped."""
        overflowed = self.overflowed
        if self.arena is not None:
            overflowed = overflowed | self.arena.overflowed
        return overflowed if self.failed is None else overflowed | (self.failed[0] != 0)

    @property
    def layer_overflowed(self) -> Tensor:
        """On the device: whether a layer of an arena has had no room."""
        return self.overflowed if self.bounds_each_layer else torch.zeros_like(self.overflowed)

    def needed_factor(self) -> Tensor:
        """On the device: the factor that the step since `reset` needed, fp32. Exact unless a layer has overflowed; an
        arena that has no room for all layers counts them nevertheless."""
        if self.arena is None or self.arena.is_checkpointed:  # which counts the forward of recompute too
            return self.need
        return (self.arena.need / self.balanced).max().float()

    def reset(self) -> None:
        """Clear the overflow flag and the need."""
        self.overflowed.zero_()
        self.need.zero_()
        if self.arena is not None:
            self.arena.reset()

    def state(self) -> list[Tensor]:
        """What the forwards since `reset` have noted on the device; a failure is no part of it."""
        of_arena = () if self.arena is None else (self.arena.need, self.arena.overflowed)
        return [self.overflowed, self.need, *of_arena]

    def start_forward(self) -> None:
        """Take from the beginning of the arena, or of its slab, again: before the forward of a microbatch."""
        if self.arena is not None:
            self.arena.start_forward(self.slab)

    @contextmanager
    def writing_to(self, slab: int) -> Iterator[None]:
        """Let the forwards within a `with` block start in this slab of the arena."""
        before, self.slab = self.slab, slab
        try:
            yield
        finally:
            self.slab = before

    @contextmanager
    def delaying_to(self, slab: int) -> Iterator[None]:
        """Let the backwards within a `with` block leave what weight gradients need in this delayed slab of the
        arena."""
        assert self.arena is not None, "there are slabs in an arena alone"
        before, self.arena.delayed_slab = self.arena.delayed_slab, slab
        try:
            yield
        finally:
            self.arena.delayed_slab = before

    def record_load(self, used: Tensor, balanced: float, overflowed: Tensor) -> None:
        """Record the rows or slots that a layer has used, an int scalar, those of a balanced load, and its overflow
        flag."""
        if self.arena is None and self.capacity_factor > 0:
            self.need.copy_(torch.maximum(self.need, used.float() / max(balanced, 1)))
        is_bounded = self.capacity_factor > 0 if self.arena is None else self.bounds_each_layer
        if is_bounded and not self.is_unbounded:
            self.overflowed.logical_or_(overflowed)

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """Lift the bound within a `with` block: nothing overflows."""
        was_unbounded, self.is_unbounded = self.is_unbounded, True
        arena, kept = self.arena, self.arena is not None and self.arena.keeps
        in_pieces = arena is not None and arena.is_in_pieces
        if arena is not None:
            arena.keeps, arena.is_in_pieces = False, self.bounds_each_layer
        try:
            yield
        finally:
            self.is_unbounded = was_unbounded
            if arena is not None:
                arena.keeps, arena.is_in_pieces = kept, in_pieces


def _none_failed() -> None:
    """The default of `ExpertCapacity.check`: exchanges by collectives do not fail on the device."""
