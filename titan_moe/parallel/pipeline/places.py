"""Assign places to microbatches in flight, from the schedule alone: of the arena, and of captured CUDA graphs."""

from contextlib import AbstractContextManager, nullcontext
from itertools import count

from titan_moe.dispatch.capacity import ExpertCapacity

InFlight = tuple[int, int]
"""A stage and a microbatch."""
NONE = -1
"""In place of a place."""


class Places:
    """Assigns the lowest free place to each (stage, microbatch) in flight. So every step uses the same places, which a
    replayed CUDA graph requires.

    Stages with MoE layers have places of their own, which are those of the arena, and stages without them have others.
    A stage without modules returns its input: it keeps nothing and has no place. If backward recomputes the forward,
    the arena keeps nothing, and all microbatches share its one place.
    """

    def __init__(
        self, capacity: ExpertCapacity, stages: frozenset[int], empty_stages: frozenset[int] = frozenset()
    ) -> None:
        """`stages` are those with MoE layers, `empty_stages` those without modules."""
        self.capacity, self.stages, self.empty_stages = capacity, stages, empty_stages
        self.taken: dict[InFlight, int] = {}
        self.delayed: dict[InFlight, int] = {}

    def take(self, stage: int, microbatch: int) -> int:
        """The place of a stage and microbatch, kept until `free`; NONE for an empty stage.

        Raises: RuntimeError if more are in flight than the arena has places.
        """
        if stage in self.empty_stages:
            return NONE
        alike = {key: place for key, place in self.taken.items() if (key[0] in self.stages) == (stage in self.stages)}
        place = next(place for place in count() if place not in alike.values())
        arena = self.capacity.arena
        if arena is not None and self._lies_in_arena(stage) and place >= arena.num_places:
            raise RuntimeError(
                f"the arena has {arena.num_places} places, for the microbatches that train.global_batch_sequences "
                f"makes, and {sorted(alike)} (stage, microbatch) are in flight before {(stage, microbatch)}; "
                "give batches of that many microbatches"
            )
        self.taken[stage, microbatch] = place
        return place

    def writing_to(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Within this context, the forward of a stage and microbatch writes to its place of the arena."""
        if not self._lies_in_arena(stage):
            return nullcontext()
        return self.capacity.writing_to(self.taken[stage, microbatch])

    def backward_of(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Within this context, the split backward of a stage and microbatch leaves what its weight gradients need in a
        delayed place of its own, kept until `free`. Where the arena delays nothing, there is none.

        Raises: RuntimeError if more are delayed than the arena has delayed places.
        """
        arena = self.capacity.arena
        if arena is None or not arena.can_delay or stage not in self.stages:
            return nullcontext()
        free = set(range(arena.num_delayed_places)) - set(self.delayed.values())
        if not free:
            raise RuntimeError(
                f"the arena has {arena.num_delayed_places} delayed places, and {sorted(self.delayed)} (stage, "
                f"microbatch) wait for weight gradients before {(stage, microbatch)}"
            )
        self.delayed[stage, microbatch] = min(free)
        return self.capacity.delaying_to(min(free))

    def free(self, stage: int, microbatch: int) -> None:
        """Free its places, after the last action that needs their contents."""
        if stage not in self.empty_stages:
            del self.taken[stage, microbatch]
        self.delayed.pop((stage, microbatch), None)

    def _lies_in_arena(self, stage: int) -> bool:
        arena = self.capacity.arena
        return arena is not None and not arena.is_checkpointed and stage in self.stages
