"""`parallel.expert_rank_capacity_factor`: "auto" follows the need of past steps, a number warns if it is too small."""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from titan_moe.plan.choice.hardware import USABLE_SHARE
from titan_moe.training.controller import Changes, Controller
from titan_moe.training.peak_memory import PeakMemory

logger = logging.getLogger("titan_moe")

CALIBRATION_STEPS = 4
"""Steps without a bound before the first factor is chosen."""
MARGIN = 1.1
"""Ratio of the chosen factor to the need. Each recent overflow multiplies it once more."""
HEADROOM = 1.05
"""The factor grows ahead of an overflow once it is less than this times the need of a step: loads that drift rarely
grow by more from one step to the next."""
STEPS_OF_FACTOR = 8
"""Factors are multiples of 1/8."""
WINDOW_STEPS = 50
"""Number of steps for which an overflow counts as recent."""
MANY_OVERFLOWS = 4
"""The bound is lifted after this number of recent overflows: the load changes too fast to follow."""
QUIET_STEPS = 500
"""The factor shrinks if this number of steps needed less."""
RESERVED_SHARE = 1 - USABLE_SHARE
"""Fraction of a GPU's memory that is left for fragmentation and workspaces."""
MANY_RERUNS, MANY_RERUNS_SHARE = 10, 0.03
"""At the tenth rerun of a fixed bound, if reruns are more than this share of all steps, it costs more than it saves."""


class CapacityControl(Controller):
    """Choose the capacity factor from the need of past steps.

    `factor` is the bound of the next step. It is 0 while there is no bound: at the start, while the load changes fast,
    or if memory cannot hold the need.
    """

    name = "capacity"

    def __init__(
        self,
        largest: Callable[[], float] = lambda: math.inf,
        *,
        missing_gib: Callable[[float], float] = lambda factor: math.nan,
        grows_ahead: bool = True,
    ) -> None:
        """`largest` is the largest factor that the memory of every rank holds, `missing_gib` what this rank lacks for
        one. Without `grows_ahead` the factor grows after an overflow alone: where another factor is another
        compilation, it costs more than a step."""
        self.factor, self.largest, self.grows_ahead = 0.0, largest, grows_ahead
        self.missing_gib = missing_gib
        self.has_told = False  # that memory does not hold the need
        self.step = 0
        self.is_at_limit = False  # memory held no more when the factor was to grow ahead of an overflow
        self.steps_to_wait = CALIBRATION_STEPS
        self.pause_steps = WINDOW_STEPS
        self.needs: deque[float] = deque(maxlen=QUIET_STEPS)
        self.overflows: deque[int] = deque()

    @property
    def changes(self) -> Changes:
        return Changes(self.factor, reason=f"the last step needed {self.needs[-1] if self.needs else 0:.3g}")

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start with the factor of an earlier run, after one step, which shows how much memory is left."""
        if state["factor"]:
            self.needs.append(state["factor"] / MARGIN)
            self.steps_to_wait = 1

    def follow(self, metrics: Mapping[str, float]) -> Changes:
        need, has_overflowed = metrics["needed_factor"], _exceeds_all_layers(metrics, self.factor)
        before = self.factor
        self.step += 1
        self.needs.append(need)
        while self.overflows and self.overflows[0] <= self.step - WINDOW_STEPS:
            self.overflows.popleft()
        if has_overflowed:
            self._grow()
        elif not self.factor:
            self.steps_to_wait -= 1
            if self.steps_to_wait <= 0:
                self.factor = self._choose(max(list(self.needs)[-WINDOW_STEPS:]))
        elif self.grows_ahead and not self.is_at_limit and self.factor < need * HEADROOM < math.inf:
            self.factor = max(self.factor, min(self._with_margin(need), self._largest()))
            self.is_at_limit = self.factor == before
        elif self.step % QUIET_STEPS == 0 and len(self.needs) == QUIET_STEPS:
            smaller = round_up(max(self.needs) * MARGIN)
            if smaller <= self.factor - 2 / STEPS_OF_FACTOR:
                self.factor = smaller
        if self.factor != before:
            self.is_at_limit = False
        return self.changes

    def _grow(self) -> None:
        self.overflows.append(self.step)
        if len(self.overflows) < MANY_OVERFLOWS:
            self.factor = self._choose(max(list(self.needs)[-WINDOW_STEPS:]))
        else:
            self._pause()

    def _pause(self) -> None:
        """Lift the bound for a while, each time for longer."""
        self.factor, self.steps_to_wait = 0.0, self.pause_steps
        self.pause_steps = min(2 * self.pause_steps, 20 * WINDOW_STEPS)
        self.overflows.clear()

    def _choose(self, need: float) -> float:
        """The factor for a need: with a margin if memory holds it, else what it holds, else none."""
        wanted = self._with_margin(need) if math.isfinite(need) else need
        largest = self._largest()
        if wanted <= largest:
            return wanted
        if need <= largest:
            return largest
        if not self.has_told:
            self.has_told = True
            logger.warning(
                "memory has no room for the rows that backward needs: a capacity factor of %.3g lacks %.2g GiB. Steps "
                "run without a bound, and so without a CUDA graph; more names in memory.recompute, a smaller "
                "train.micro_batch_sequences or more ranks make room",
                wanted,
                self.missing_gib(wanted),
            )
        self._pause()
        return 0.0

    def _with_margin(self, need: float) -> float:
        return round_up(need * MARGIN ** (1 + len(self.overflows)))

    def _largest(self) -> float:
        return math.floor(min(self.largest(), 1e6) * STEPS_OF_FACTOR) / STEPS_OF_FACTOR


class FixedCapacity(Controller):
    """Warn once of a factor that so many steps exceed that another would be faster."""

    name = "capacity"

    def __init__(self, factor: float) -> None:
        self.factor, self.num_steps, self.num_reruns = factor, 0, 0

    def follow(self, metrics: Mapping[str, float]) -> Changes:
        self.num_steps += 1
        has_overflowed = _exceeds_all_layers(metrics, self.factor)
        self.num_reruns += has_overflowed
        is_tenth = has_overflowed and self.num_reruns == MANY_RERUNS
        if is_tenth and self.num_reruns > self.num_steps * MANY_RERUNS_SHARE:
            logger.warning(
                "%d of %d steps were repeated, because rows exceeded the capacity; "
                'parallel.expert_rank_capacity_factor = "auto", or a number above %g, lowers the number',
                self.num_reruns,
                self.num_steps,
                self.factor,
            )
        return self.changes

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}  # with which "auto" would go on

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The recipe says the factor."""


class LargestNeed(Controller):
    """Remember the largest capacity factor that a step needed."""

    name = "largest_need"

    def __init__(self) -> None:
        self.factor = 0.0

    @property
    def summary(self) -> str:
        would_do = f"{round_up(self.factor):g} would have sufficed"
        return f"steps needed a capacity factor of up to {self.factor:.3g}; {would_do}" if self.factor else ""

    def follow(self, metrics: Mapping[str, float]) -> Changes:
        self.factor = max(self.factor, metrics["needed_factor"])
        return self.changes

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor = state["factor"]


def _exceeds_all_layers(metrics: Mapping[str, float], factor: float) -> bool:
    """Whether a step had to be taken again, and not for a layer alone (layer_capacity.py)."""
    is_of_a_layer = metrics.get("has_overflowed_layer", 0) > 0 and metrics["needed_factor"] <= factor
    return metrics["has_overflowed"] > 0 and not is_of_a_layer


def round_up(factor: float) -> float:
    """The next multiple of 1/8, at least 1."""
    return max(math.ceil(factor * STEPS_OF_FACTOR - 1e-6) / STEPS_OF_FACTOR, 1.0)


def largest_factor(memory: PeakMemory) -> float:
    """The largest factor of an arena that the memory of every rank holds, by the peak of the steps so far and what will
    raise it for the first time; infinite without an arena or a GPU. A collective call."""
    capacity, device = memory.capacity, memory.device
    arena, loads = capacity.arena, capacity.loads
    if arena is None or loads is None or device.type != "cuda":
        return math.inf
    factor = capacity.need.new_tensor(loads.largest_factor(*arena.room_bytes, _bytes_for_arena(memory)))
    dist.all_reduce(factor, dist.ReduceOp.MIN)
    return factor.item()


def missing_gib(memory: PeakMemory, factor: float) -> float:
    """What this rank's memory lacks for the arena of a factor; negative if it holds it."""
    arena, loads = memory.capacity.arena, memory.capacity.loads
    if arena is None or loads is None or memory.device.type != "cuda":
        return math.nan
    needed = sum(number * size for number, size in zip(loads.room(factor), arena.room_bytes, strict=True))
    return (needed - _bytes_for_arena(memory)) / 2**30


def bytes_beside_all(memory: PeakMemory) -> float:
    """What of this rank's memory is left beside the peak so far and the arena."""
    arena = memory.capacity.arena
    return _bytes_for_arena(memory) - (0 if arena is None else arena.num_bytes)


def _bytes_for_arena(memory: PeakMemory) -> float:
    free, total = torch.cuda.mem_get_info(memory.device)
    of_others = total - free - torch.cuda.memory_reserved(memory.device)
    return total * (1 - RESERVED_SHARE) - of_others - memory.bytes_beside_arena - memory.bytes_to_come
