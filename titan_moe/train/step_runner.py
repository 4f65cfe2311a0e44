"""The optimizer steps of a run: launched or replayed, and taken again where rows did not fit."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from titan_moe.compile.cudagraph import NUM_WARM_UPS, Captured, Recorder
from titan_moe.data.packing import Batch
from titan_moe.optim.schedule import Schedules
from titan_moe.optim.state import local
from titan_moe.train.forward_backward import ForwardBackward
from titan_moe.train.step import StepResult, TrainStep

logger = logging.getLogger("titan_moe")

MANY_RERUNS, MANY_RERUNS_SHARE = 10, 0.03
"""When the tenth step is taken again, and they were more than this share of all, the bound costs more than it saves."""


class StepRunner:
    """Takes one step after the other, from a CUDA graph where the recipe says so.

    Where slots are bounded, the host reads one flag after each step. A step that did not fit has changed nothing: it is
    taken again without the bound, launched kernel by kernel, from the same random state. Nothing is lost but time.
    """

    def __init__(
        self,
        step: TrainStep,
        schedule: Schedules,
        extent: str = "off",
        make_recorder: Callable[[], Recorder] = Recorder,
    ) -> None:
        """`extent` is the recipe's `compile.cudagraph`."""
        self.step, self.schedule = step, schedule
        self.num_steps, self.num_reruns = 0, 0
        """Steps so far, and those of them that were taken again."""
        self.num_warm_ups = 0
        self.replay: Callable[[Batch], StepResult] = step
        self.release: Callable[[], None] = _nothing
        if extent != "off":
            self._capture(extent, make_recorder())

    def _capture(self, extent: str, recorder: Recorder) -> None:
        self.num_warm_ups = NUM_WARM_UPS
        self.warm_up = recorder.run
        if extent == "step":
            captured = Captured(self.step, recorder)
            self.replay, self.release = captured, captured.release
        else:
            microbatches = CapturedMicrobatches(self.step.forward_backward, self.step.optimizers.parameters, recorder)
            self.replay = replace(self.step, forward_backward=microbatches)
            self.release = microbatches.release

    def __call__(self, batch: Batch) -> StepResult:
        """Take a step; what it returns is valid until the next."""
        self.num_steps += 1
        is_bounded = self.step.capacity.is_bounded
        random_states = _random_states(batch.tokens_MBN.device) if is_bounded else []
        result = self._take(batch)
        has_overflowed = is_bounded and bool(result.has_overflowed)
        self.step.capacity.check()  # the step may be void because a rank is missing: it would not come again
        if has_overflowed:
            result = self._take_again(batch, random_states)
        self.schedule.step()
        return result

    def _take(self, batch: Batch) -> StepResult:
        if self.num_warm_ups == 0:
            return self.replay(batch)
        self.num_warm_ups -= 1
        return self.warm_up(lambda: self.step(batch))

    def _take_again(self, batch: Batch, random_states: list[Tensor]) -> StepResult:
        self._count_rerun()
        self.release()  # the launched step needs the memory; the next one is recorded anew
        _restore(random_states, batch.tokens_MBN.device)
        with self.step.capacity.unbounded():
            return self.step(batch)

    def _count_rerun(self) -> None:
        self.num_reruns += 1
        if self.num_reruns == MANY_RERUNS and self.num_reruns > self.num_steps * MANY_RERUNS_SHARE:
            logger.warning(
                "%d of %d steps were taken again, because rows did not fit: with a larger "
                "parallel.expert_rank_capacity_factor than %g fewer would be",
                self.num_reruns,
                self.num_steps,
                self.step.capacity.capacity_factor,
            )


class CapturedMicrobatches:
    """Forward and backward of a step, each microbatch replayed from one graph.

    A graph adds to the gradients where they lay when it was recorded. So they stay there, and are emptied before each
    step; a parameter that the loss does not reach has a gradient of zero, not none.
    """

    def __init__(self, forward_backward: ForwardBackward, parameters: list[nn.Parameter], recorder: Recorder) -> None:
        self.parameters = parameters
        self.gradients: list[Tensor] = []
        self.captured = Captured(forward_backward, recorder)

    def __call__(self, batch: Batch, scale: Tensor) -> Tensor:
        self._allocate_gradients()
        losses = [self.captured(microbatch, scale).clone() for microbatch in batch.split()]
        return torch.stack(losses).sum()

    def release(self) -> None:
        """Give the graph's memory and the gradients back."""
        self.gradients = []
        self.captured.release()

    def _allocate_gradients(self) -> None:
        self.gradients = self.gradients or [torch.zeros_like(parameter) for parameter in self.parameters]
        torch._foreach_zero_([local(gradient) for gradient in self.gradients])
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient


def _nothing() -> None:
    """There is no recording to release."""


def _random_states(device: torch.device) -> list[Tensor]:
    """Of the host's generator, and of the device's if that is another."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _restore(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
