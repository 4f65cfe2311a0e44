"""`parallel.expert_layer_capacity_factor`: double it if layers exceed it again and again, or lift the bound."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from titan_moe.training.capacity_control import MANY_OVERFLOWS, WINDOW_STEPS, bytes_beside_all
from titan_moe.training.controller import Changes, Controller
from titan_moe.training.peak_memory import PeakMemory

logger = logging.getLogger("titan_moe")


class LayerCapacity(Controller):
    """Follow the steps that were taken again because a layer had no room.

    `factor` is the bound of the next step. It is 0 once layers have exceeded it again and again and memory has no room
    for more: then steps take layers in pieces, launched, for the rest of the run.
    """

    name = "layer_capacity"

    def __init__(self, factor: float, has_room: Callable[[float], bool] = lambda factor: True) -> None:
        """`has_room` says whether the memory of every rank has room for a larger factor."""
        self.factor, self.has_room, self.step = factor, has_room, 0
        self.overflows: deque[int] = deque()

    @property
    def changes(self) -> Changes:
        reason = f"{MANY_OVERFLOWS} of the last {WINDOW_STEPS} steps were taken again, because a layer had no room"
        return Changes(layer_factor=self.factor, reason=reason)

    def follow(self, metrics: Mapping[str, float]) -> Changes:
        self.step += 1
        while self.overflows and self.overflows[0] <= self.step - WINDOW_STEPS:
            self.overflows.popleft()
        if metrics["has_overflowed_layer"] > 0:
            self.overflows.append(self.step)
        if len(self.overflows) == MANY_OVERFLOWS:
            self.overflows.clear()
            larger = 2 * self.factor
            has_room = self.has_room(larger)
            if not has_room:
                logger.warning(
                    "layers exceed %g times the balanced load again and again, and memory has no room for "
                    "parallel.expert_layer_capacity_factor = %g. Steps take layers in pieces from now on, without a "
                    "CUDA graph; more names in memory.recompute, a smaller train.micro_batch_sequences or a router "
                    "with more balance help",
                    self.factor,
                    larger,
                )
            self.factor = larger if has_room else 0.0
        return self.changes

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the recipe says the factor. Memory may have no room for that of an earlier run."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The recipe says the factor."""


def has_room(memory: PeakMemory, temporary_bytes: Callable[[float], int], factor: float) -> bool:
    """Whether the memory of every rank has room for the temporaries of a layer at a larger factor, and for the arena,
    which holds at least a layer; on a CPU always. A collective call."""
    capacity = memory.capacity
    arena, worst, now = capacity.arena, capacity.worst_loads, capacity.loads
    if memory.device.type != "cuda" or arena is None or worst is None or now is None:
        return True
    all_layers = 0.0 if arena.is_checkpointed else capacity.capacity_factor
    rooms = zip(worst.bounded(factor).room(all_layers), now.room(all_layers), arena.room_bytes, strict=True)
    more = temporary_bytes(factor) - temporary_bytes(capacity.layer_factor)
    more += sum((then - before) * size for then, before, size in rooms)
    left = capacity.need.new_tensor(bytes_beside_all(memory) - more)
    dist.all_reduce(left, dist.ReduceOp.MIN)
    return left.item() >= 0
