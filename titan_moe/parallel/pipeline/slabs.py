"""Assign the slabs of the arena to microbatches in flight, from the schedule alone."""

from contextlib import AbstractContextManager, nullcontext

from titan_moe.dispatch.capacity import ExpertCapacity

InFlight = tuple[int, int]
"""A stage and a microbatch."""


class Slabs:
    """Assigns the lowest free slab of the arena to each (stage, microbatch) in flight. So every step uses the same
    slabs, which a replayed CUDA graph requires.

    Without an arena, and for stages without MoE layers, there is nothing to assign. If backward recomputes the forward,
    the arena keeps nothing, and all microbatches share its one slab.
    """

    def __init__(self, capacity: ExpertCapacity, stages: frozenset[int]) -> None:
        """`stages` are those with MoE layers."""
        self.capacity, self.stages = capacity, stages
        self.taken: dict[InFlight, int] = {}
        self.delayed: dict[InFlight, int] = {}

    def forward_of(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Within this context, the forward of a stage and microbatch writes to a slab of its own, kept until `free`.

        Raises: RuntimeError if more are in flight than the arena has slabs.
        """
        arena = self.capacity.arena
        if arena is None or arena.is_checkpointed or stage not in self.stages:
            return nullcontext()
        free = set(range(arena.num_slabs)) - set(self.taken.values())
        if not free:
            raise RuntimeError(
                f"the arena has {arena.num_slabs} slabs, for the microbatches that train.global_batch_sequences "
                f"makes, and {sorted(self.taken)} (stage, microbatch) are in flight before {(stage, microbatch)}; "
                "give batches of that many microbatches"
            )
        self.taken[stage, microbatch] = min(free)
        return self.capacity.writing_to(min(free))

    def backward_of(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Within this context, the split backward of a stage and microbatch leaves what its weight gradients need in a
        delayed slab of its own, kept until `free`. Where the arena delays nothing, there is none.

        Raises: RuntimeError if more are delayed than the arena has delayed slabs.
        """
        arena = self.capacity.arena
        if arena is None or not arena.can_delay or stage not in self.stages:
            return nullcontext()
        free = set(range(arena.num_delayed_slabs)) - set(self.delayed.values())
        if not free:
            raise RuntimeError(
                f"the arena has {arena.num_delayed_slabs} delayed slabs, and {sorted(self.delayed)} (stage, "
                f"microbatch) wait for weight gradients before {(stage, microbatch)}"
            )
        self.delayed[stage, microbatch] = min(free)
        return self.capacity.delaying_to(min(free))

    def free(self, stage: int, microbatch: int) -> None:
        """Free its slabs, after the last action that needs their contents."""
        self.taken.pop((stage, microbatch), None)
        self.delayed.pop((stage, microbatch), None)
