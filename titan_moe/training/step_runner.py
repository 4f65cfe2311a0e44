"""The optimizer steps of a run: launched or replayed, and repeated after an overflow of the capacity."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from titan_moe.compile.cudagraph import NUM_WARM_UPS, Captured, Recorder, idle_pool_bytes
from titan_moe.config.schema import counted
from titan_moe.data.packing import Batch
from titan_moe.metrics.experts import read_scalars
from titan_moe.optim.schedule import Schedules
from titan_moe.training.controller import Changes, Controller
from titan_moe.training.peak_memory import PeakMemory
from titan_moe.training.step import StepResult, TrainStep

logger = logging.getLogger("titan_moe")

Kind = Literal["launched", "recorded", "replayed", "repeated"]
"""How a step was taken: its kernels launched one by one, recorded and then replayed from a CUDA graph, replayed, or
launched again without a bound."""
OVERFLOWS = "has_overflowed", "has_overflowed_layer"
"""Metrics of a step, whether it is taken again or not."""
UNUSED_FACTOR = 1.25
"""Of a bound that is lifted before it was ever chosen."""


class StepRunner:
    """Runs the steps of a run, from a CUDA graph if the recipe has `compile.cudagraph`.

    If rows are bounded or a controller follows the steps, the host reads the metrics of each. A step that overflowed
    has changed nothing. It is repeated without the bound, without a CUDA graph, from the same random state.
    """

    def __init__(
        self,
        step: TrainStep,
        schedule: Schedules,
        is_captured: bool = False,
        make_recorder: Callable[[], Recorder] = Recorder,
        controllers: Sequence[Controller] = (),
        step_number: Tensor | None = None,
        memory: PeakMemory | None = None,
    ) -> None:
        """With `is_captured` a step is one CUDA graph, after warm-ups. A forced load and noise on routers read their
        step, from 0, from `step_number`. `memory` must be the one that `controllers` read."""
        self.step, self.schedule, self.controllers = step, schedule, controllers
        self.memory = memory or PeakMemory(step.capacity)
        self.step_number, self.num_steps_before = step_number, 0  # of an earlier process
        self.num_steps, self.num_reruns = 0, 0  # so far
        self.needed_factor = 0.0  # of the last step
        self.bound: float | None = None  # of the next one; 0: it is lifted; None: as the recipe says
        self.layer_factor: float | None = None  # of each layer; 0: that bound is lifted too, for good
        self.num_warm_ups = self.num_warm_ups_before = 0  # steps before a capture
        self.num_microbatches = 0  # of the last step that was to be captured
        self.kind: Kind = "launched"  # of the last step
        self.captured: Captured | None = None
        if is_captured:
            recorder = make_recorder()
            self.num_warm_ups = self.num_warm_ups_before = NUM_WARM_UPS
            self.warm_up, self.captured = recorder.run, Captured(step, recorder)
        self.resume()

    def resume(self, num_steps: int = 0) -> None:
        """Go on after the steps of an earlier run, with the state that `controllers` have from it."""
        self.num_steps_before = num_steps
        for controller in self.controllers:
            self._carry_out(controller.changes)

    @property
    def manner(self) -> tuple[Kind, float, float | None, int]:
        """How the last step was taken and the next one is bounded; equal for steps that are one program."""
        return self.kind, self.capacity_factor, self.layer_factor, self.step.replicas.number_in_use

    @property
    def is_in_pieces(self) -> bool:
        """Whether all bounds are lifted for the rest of the run."""
        return self.layer_factor == 0

    @property
    def is_steady(self) -> bool:
        """Whether the last step was taken as those of a long run are: replayed if it records graphs, and bounded if it
        chooses a bound; or launched, once bounds are lifted for good."""
        if self.is_in_pieces:
            return self.kind == "launched"
        kind = "launched" if self.captured is None else "replayed"
        return self.kind == kind and self.bound != 0

    @property
    def next_step(self) -> int:
        """The number of the next step, from 1."""
        return self.num_steps_before + self.num_steps + 1

    @property
    def num_recordings(self) -> int:
        """CUDA graphs recorded so far: the first, and one after each release."""
        return 0 if self.captured is None else self.captured.num_recordings

    @property
    def capacity_factor(self) -> float:
        """The bound of the next step; 0 without one."""
        return self.step.capacity.capacity_factor if self.bound is None or self.is_in_pieces else self.bound

    @property
    def numbers(self) -> dict[str, Any]:
        """Metrics of how steps are taken. They count those of this process."""
        numbers = {"rerun_steps": self.num_reruns, "rerun_share": self.num_reruns / self.num_steps}
        numbers |= {"graph_recordings": self.num_recordings, "expert_clones": self.step.replicas.number_in_use}
        capacity = {"factor": self.capacity_factor, "needed": self.needed_factor}
        return numbers | ({"capacity": capacity} if self.needed_factor else {})

    def release(self) -> None:
        """Free the memory of recordings. The next step is captured again."""
        if self.captured is not None:
            self.captured.release()
        if self.memory.idle_pool_bytes:
            self.memory.hold_in_pools(0)

    def launch_next(self) -> None:
        """Launch the kernels of the next step one by one, those that a recording would have, as a warm-up does."""
        self.release()  # the step needs the memory
        self.num_warm_ups = 1

    def __call__(self, batch: Batch) -> StepResult:
        """Take a step; its result is valid until the next one."""
        if self.step_number is not None:
            self.step_number.fill_(self.num_steps_before + self.num_steps)
        self.num_steps += 1
        capacity = self.step.capacity
        if not self.controllers and not capacity.is_bounded:
            result = self._take(batch)
            capacity.check()
        else:
            random_states = _random_states(batch.tokens_MBN.device)
            result = self._take(batch)
            seen = _read(result)
            capacity.check()  # the step may be void because a rank is missing: it would not come again
            if seen["has_overflowed"]:
                result = self._take_again(batch, random_states)
                seen = _read(result) | {name: seen[name] for name in OVERFLOWS if name in seen}
                capacity.check()
            self.needed_factor = seen["needed_factor"]
            if math.isfinite(seen["grad_norm"]):  # NaN makes routers choose the same experts for all tokens
                for controller in self.controllers:
                    self._carry_out(controller.follow(seen))
        self.schedule.step()
        return result

    def _take(self, batch: Batch) -> StepResult:
        self.kind = "launched"
        if self.bound == 0 or self.is_in_pieces:
            with self.step.capacity.unbounded():
                return self.step(batch)
        result = self._take_bounded(batch)
        self.memory.bytes_of_first_bounded_step = 0
        return result

    def _take_bounded(self, batch: Batch) -> StepResult:
        if self.captured is None:
            return self.step(batch)
        if (number := len(batch.tokens_MBN)) != self.num_microbatches:
            if self.num_microbatches:  # a recording has another number, and the first of several may be compiled anew
                self.release()
                self.num_warm_ups = self.num_warm_ups_before
            self.num_microbatches = number
        if self.num_warm_ups > 0:
            self.num_warm_ups -= 1
            return self.warm_up(lambda: self.step(batch))
        num_recordings, result, self.kind = self.num_recordings, self.captured(batch), "replayed"
        if self.num_recordings > num_recordings:
            self.kind = "recorded"
            self.memory.hold_in_pools(idle_pool_bytes(self.memory.device))
        return result

    def _carry_out(self, changes: Changes) -> None:
        """Take the next steps as a controller wants them."""
        factor, layer_factor, uses_clones = changes.capacity_factor, changes.layer_factor, changes.uses_clones
        if factor is not None and factor != self.bound and not self.is_in_pieces:
            self._log_change(f"capacity factor {factor:g}" if factor else "no capacity bound", changes)
            self._bound(factor)
        if layer_factor is not None and layer_factor != self.layer_factor:
            self._bound_layers(layer_factor, changes)
        if uses_clones is not None and uses_clones != self.step.replicas.are_used:
            number = counted(self.step.replicas.number, "clone")
            self._log_change(f"up to {number} of experts a rank" if uses_clones else "no clones of experts", changes)
            self.step.replicas.are_used = uses_clones
            self.release()  # a recording has the other exchanges
            self.num_warm_ups = self.num_warm_ups_before  # the layers may not be compiled with these yet

    def _log_change(self, what: str, changes: Changes) -> None:
        if self.num_steps:
            logger.info("%s from step %d on; %s", what, self.next_step, changes.reason)

    def _bound(self, factor: float) -> None:
        """Bound the next steps by a factor; 0 lifts the bound."""
        capacity, is_start, self.bound = self.step.capacity, self.bound is None, factor
        if is_start and (factor or capacity.arena is None):
            capacity.resize(factor or UNUSED_FACTOR)
        if is_start or (capacity.arena is None and not factor):
            return  # the sizes stay, for the steps after
        self.release()  # a recording has other sizes or addresses
        with self.memory.changing():
            capacity.resize(factor)
        if capacity.arena is None:  # compiled graphs have the sizes of layers
            torch._dynamo.reset()
            self.num_warm_ups = self.num_warm_ups_before

    def _bound_layers(self, factor: float, changes: Changes) -> None:
        """Bound each layer by a factor; 0 lifts the bound for good."""
        is_start, self.layer_factor = self.layer_factor is None, factor
        if is_start:  # as the recipe says
            return
        self._log_change(f"capacity factor {factor:g} of each layer" if factor else "layers in pieces", changes)
        self.release()
        with self.memory.changing():
            if factor:
                self.step.capacity.resize_layers(factor)
            else:
                self.step.capacity.resize(0.0)  # the arena keeps nothing more
        if factor:
            torch._dynamo.reset()  # compiled graphs have the sizes of layers
            self.num_warm_ups = self.num_warm_ups_before

    def _take_again(self, batch: Batch, random_states: list[Tensor]) -> StepResult:
        self.kind = "repeated"
        self.num_reruns += 1
        self.release()  # the launched step needs the memory; the next step is captured again
        _restore(random_states, batch.tokens_MBN.device)
        with self.step.capacity.unbounded():
            return self.step(batch)


def _read(result: StepResult) -> dict[str, float]:
    """The metrics of a step, in one copy from the device."""
    return dict(zip(result.metrics, read_scalars(list(result.metrics.values())), strict=True))


def _random_states(device: torch.device) -> list[Tensor]:
    """The state of the host's generator, and of a GPU's."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _restore(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
