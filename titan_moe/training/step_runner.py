"""The optimizer steps of a run: launched or replayed, and repeated after an overflow of the capacity."""

import logging
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from titan_moe.compile.cudagraph import NUM_WARM_UPS, Captured, Recorder, idle_pool_bytes
from titan_moe.config.schema import counted
from titan_moe.data.packing import Batch
from titan_moe.optim.schedule import Schedules
from titan_moe.training.capacity_control import CapacityControl
from titan_moe.training.clone_control import CloneControl
from titan_moe.training.peak_memory import PeakMemory
from titan_moe.training.step import StepResult, TrainStep

logger = logging.getLogger("titan_moe")

MANY_RERUNS, MANY_RERUNS_SHARE = 10, 0.03
"""At the tenth rerun of a fixed bound, if reruns are more than this share of all steps, it costs more than it saves."""
Kind = Literal["launched", "recorded", "replayed", "repeated"]
"""How a step was taken: its kernels launched one by one, recorded and then replayed from a CUDA graph, replayed, or
launched again without a bound."""
UNUSED_FACTOR = 1.25
"""Of a bound that is lifted before it was ever chosen."""


class StepRunner:
    """Runs the steps of a run, from a CUDA graph if the recipe has `compile.cudagraph`.

    If rows are bounded, the host reads the overflow flag, the need and the imbalance of ranks after each step. A step
    that overflowed has changed nothing. It is repeated without the bound, without a CUDA graph, from the same random
    state.
    """

    def __init__(
        self,
        step: TrainStep,
        schedule: Schedules,
        is_captured: bool = False,
        make_recorder: Callable[[], Recorder] = Recorder,
        control: CapacityControl | None = None,
        clone_control: CloneControl | None = None,
        forced_step: Tensor | None = None,
        memory: PeakMemory | None = None,
    ) -> None:
        """With `is_captured` a step is one CUDA graph, after warm-ups. Without `control` the capacity factor is the
        recipe's, and without `clone_control` replica slots stay as they are. A forced load reads its step, from 0, from
        `forced_step`. `memory` must be the one that `control` reads."""
        self.step, self.schedule = step, schedule
        self.memory = memory or PeakMemory(step.capacity)
        self.control, self.clone_control = control, clone_control
        self.forced_step, self.num_steps_before = forced_step, 0  # of an earlier process
        self.num_steps, self.num_reruns = 0, 0  # so far
        self.needed_factor, self.largest_need = 0.0, 0.0  # of the last step, and of all
        self.num_warm_ups = self.num_warm_ups_before = 0  # steps before a capture
        self.kind: Kind = "launched"  # of the last step
        self.captured: Captured | None = None
        if is_captured:
            recorder = make_recorder()
            self.num_warm_ups = self.num_warm_ups_before = NUM_WARM_UPS
            self.warm_up, self.captured = recorder.run, Captured(step, recorder)
        if control is not None and step.capacity.arena is None:
            step.capacity.resize(UNUSED_FACTOR)

    def resume(self, capacity_factor: float, clones: str = "", num_steps: int = 0) -> None:
        """Go on after the steps of an earlier run, with the bound and the state of `clone_control` that it had."""
        self.num_steps_before = num_steps
        if self.control is not None and capacity_factor:
            self.control.resume(capacity_factor)
        if self.clone_control is not None:
            self.clone_control.load_state(clones)
            self.step.replicas.are_used = self.clone_control.are_used

    @property
    def manner(self) -> tuple[Kind, float, int]:
        """How the last step was taken and the next one is bounded; equal for steps that are one program."""
        return self.kind, self.capacity_factor, self.step.replicas.number_in_use

    @property
    def is_steady(self) -> bool:
        """Whether the last step was taken as those of a long run are: replayed if it records graphs, and bounded if it
        chooses a bound."""
        kind = "launched" if self.captured is None else "replayed"
        return self.kind == kind and (self.control is None or self.control.factor > 0)

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
        return self.step.capacity.capacity_factor if self.control is None else self.control.factor

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
        if self.forced_step is not None:
            self.forced_step.fill_(self.num_steps_before + self.num_steps)
        self.num_steps += 1
        capacity = self.step.capacity
        if self.control is None and self.clone_control is None and not capacity.is_bounded:
            result = self._take(batch)
            capacity.check()
        else:
            random_states = _random_states(batch.tokens_MBN.device)
            result = self._take(batch)
            has_overflowed, is_finite, self.needed_factor, imbalance = _read_loads(result)
            capacity.check()  # the step may be void because a rank is missing: it would not come again
            if has_overflowed:
                result = self._take_again(batch, random_states)
                _, is_finite, self.needed_factor, imbalance = _read_loads(result)
                capacity.check()
            if is_finite:  # NaN makes routers choose the same experts for all tokens: no load to prepare for
                self._follow(has_overflowed, imbalance)
        self.schedule.step()
        return result

    def _follow(self, has_overflowed: bool, imbalance: float) -> None:
        """Set the bound of the next step, and whether it uses clones, after one whose gradients were finite."""
        self.largest_need = max(self.largest_need, self.needed_factor)
        if self.control is not None:
            before = self.control.factor
            after = self.control.follow(self.needed_factor, has_overflowed)
            if after != before:
                self._bound(after)
        if self.clone_control is not None:
            self._use_clones(self.clone_control.follow(imbalance), self.clone_control.mean)

    def _take(self, batch: Batch) -> StepResult:
        self.kind = "launched"
        if self.control is not None and not self.control.factor:
            with self.step.capacity.unbounded():
                return self.step(batch)
        if self.captured is None:
            return self.step(batch)
        if self.num_warm_ups > 0:
            self.num_warm_ups -= 1
            return self.warm_up(lambda: self.step(batch))
        num_recordings, result, self.kind = self.num_recordings, self.captured(batch), "replayed"
        if self.num_recordings > num_recordings:
            self.kind = "recorded"
            self.memory.hold_in_pools(idle_pool_bytes(self.memory.device))
        return result

    def _bound(self, factor: float) -> None:
        """Bound the next steps by a factor; 0 lifts the bound."""
        capacity = self.step.capacity
        what = f"capacity factor {factor:g}" if factor else "no capacity bound"
        logger.info("%s from step %d on; the last step needed %.3g", what, self.next_step, self.needed_factor)
        if capacity.arena is None and not factor:
            return  # the sizes stay, for the steps after
        self.release()  # a recording has other sizes or addresses
        with self.memory.changing():
            capacity.resize(factor)
        if capacity.arena is None:  # compiled graphs have the sizes of layers
            torch._dynamo.reset()
            self.num_warm_ups = self.num_warm_ups_before

    def _use_clones(self, are_used: bool, imbalance: float) -> None:
        """Use the replica slots from the next step on, or not; `imbalance` is that of recent steps."""
        replicas = self.step.replicas
        if are_used == replicas.are_used:
            return
        replicas.are_used = are_used
        what = f"up to {counted(replicas.number, 'clone')} of experts a rank" if are_used else "no clones of experts"
        logger.info(
            "%s from step %d on; the busiest rank had %.3g times the mean load in recent steps",
            what,
            self.next_step,
            imbalance,
        )
        self.release()  # a recording has the other exchanges
        self.num_warm_ups = self.num_warm_ups_before  # the layers may not be compiled with these yet

    def _take_again(self, batch: Batch, random_states: list[Tensor]) -> StepResult:
        self.kind = "repeated"
        self.num_reruns += 1
        is_fixed = self.control is None
        if is_fixed and self.num_reruns == MANY_RERUNS and self.num_reruns > self.num_steps * MANY_RERUNS_SHARE:
            logger.warning(
                "%d of %d steps were repeated, because rows exceeded the capacity; "
                'parallel.expert_rank_capacity_factor = "auto", or a number above %g, lowers the number',
                self.num_reruns,
                self.num_steps,
                self.step.capacity.capacity_factor,
            )
        self.release()  # the launched step needs the memory; the next step is captured again
        _restore(random_states, batch.tokens_MBN.device)
        with self.step.capacity.unbounded():
            return self.step(batch)


def _read_loads(result: StepResult) -> tuple[bool, bool, float, float]:
    """Whether a step has overflowed, whether its gradients are finite, the factor that it needed, and its imbalance, in
    one copy from the device."""
    flags = [result.has_overflowed.float(), result.grad_norm.isfinite().float()]
    loads = [result.needed_factor, result.imbalance.float()]
    has_overflowed, is_finite, needed_factor, imbalance = torch.stack([*flags, *loads]).tolist()
    return bool(has_overflowed), bool(is_finite), needed_factor, imbalance


def _random_states(device: torch.device) -> list[Tensor]:
    """The state of the host's generator, and of a GPU's."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _restore(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
