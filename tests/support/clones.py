"""Clones in models that are too small for `parallel.expert_clones = "auto"`."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from titan_moe.dispatch.clones.optional import ReplicaSlots
from titan_moe.plan.resolved import Resolved
from titan_moe.training import build, resolve_auto


@contextmanager
def always_used() -> Iterator[None]:
    """Replica slots of a recipe that has clones are there at every size, in use from the first step on, and a clone
    costs nothing."""

    def replica_slots(resolved: Resolved) -> ReplicaSlots:
        return ReplicaSlots(resolved.num_clones, are_used=True)

    with (
        mock.patch.object(resolve_auto, "resolve_clones", lambda recipe, world_size: recipe),
        mock.patch.object(build, "replica_slots", replica_slots),
        mock.patch.object(build, "CloneControl", lambda pays_from: None),
    ):
        yield
