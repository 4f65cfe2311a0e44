"""The places of the arena that microbatches in flight have: chosen by the schedule alone."""

from contextlib import AbstractContextManager, nullcontext

from titan_moe.dispatch.capacity import ExpertCapacity

InFlight = tuple[int, int]
"""A stage and a microbatch."""


class Places:
    """Gives each (stage, microbatch) in flight the lowest free place of the arena. So every step uses the same places,
    as a CUDA graph does that is replayed.

    Without an arena, and for stages without MoE layers, there is nothing to give. Where backward follows a recomputed
    forward, nothing is kept: there is one place for all.
    """

    def __init__(self, capacity: ExpertCapacity, stages: frozenset[int]) -> None:
        """`stages` are those with MoE layers."""
        self.capacity, self.stages = capacity, stages
        self.taken: dict[InFlight, int] = {}

    def forward_of(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Within it, the forward of this stage and microbatch has a place of its own, until `free`.

        Raises: RuntimeError if more are in flight than the arena has places.
        """
        arena = self.capacity.arena
        if arena is None or arena.is_checkpointed or stage not in self.stages:
            return nullcontext()
        free = set(range(arena.num_places)) - set(self.taken.values())
        if not free:
            raise RuntimeError(
                f"the arena has {arena.num_places} places, for the microbatches that train.global_batch_sequences "
                f"makes, and {sorted(self.taken)} (stage, microbatch) are in flight before {(stage, microbatch)}; "
                "give batches of that many microbatches"
            )
        self.taken[stage, microbatch] = min(free)
        return self.capacity.writing_to(min(free))

    def free(self, stage: int, microbatch: int) -> None:
        """After the last action that needs what was kept."""
        self.taken.pop((stage, microbatch), None)
