"""Learning rate schedule: linear warm-up, constant, decay at the end (WSD, arXiv:2404.06395)."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from titan_moe.config.train import OptimConfig
from titan_moe.optim.build import Optimizers
from titan_moe.titan import LRSchedulersContainer

DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""`progress` of the decay, from 0 to 1 -> factor, from 1 to 0."""


class Schedules(LRSchedulersContainer):
    """The schedule of all optimizers of a run.

    Its state is the step alone: a resumed run takes the curve from its recipe. Where an optimizer keeps its rate on the
    device, the schedule fills that tensor, which a captured step reads, and never reads it. A group's `lr_scale` is a
    factor on its rate. An average of the weights follows the step too.
    """

    def __init__(self, optimizers: Optimizers, lr: float, factor: Callable[[int], float]) -> None:
        super().__init__(optimizers, factor)
        self.base_lr, self.factor, self.average = lr, factor, optimizers.average
        self._go_to(0)

    @property
    def lr(self) -> float:
        """The learning rate of the next optimizer step, of groups without a scale."""
        return self.base_lr * self.factor(self.schedulers[0].last_epoch)

    def step(self) -> None:
        """After each optimizer step."""
        super().step()
        self._follow()

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self.schedulers[0].last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._go_to(int(state_dict["last_step"]))

    def _go_to(self, step: int) -> None:
        for scheduler in self.schedulers:
            groups = scheduler.optimizer.param_groups
            scheduler.last_epoch = step
            # torch's are tensors where the rates are
            scheduler.base_lrs = [self.base_lr * group.get("lr_scale", 1.0) for group in groups]
            scheduler._last_lr = [base_lr * self.factor(step) for base_lr in scheduler.base_lrs]
            for group, lr in zip(groups, scheduler._last_lr, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
        self._follow()

    def _follow(self) -> None:
        if self.average is not None:
            self.average.follow(self.schedulers[0].last_epoch)


def build_schedule(optimizers: Optimizers, config: OptimConfig, steps: int) -> Schedules:
    """Build the schedule of a run of `steps` optimizer steps; call its `step()` once after each.

    Step s (the first is 1) of the warm-up has the rate `lr * s / warmup_steps`, its last step the full rate. The decay
    is exactly the last `decay_steps` steps; the run's last step has `lr * min_lr_ratio`. In a run too short for both,
    the warm-up comes first (without it training may diverge) and the decay has the remaining steps. With `decay_ends`
    each period is as such a run, the later ones with the warm-up of a restart. torchtitan's own
    curve is not used: its decay is one step shorter and does not reach the end.
    """
    return Schedules(optimizers, config.lr, partial(lr_factor, config=config, steps=steps))


def lr_factor(num_steps_done: int, config: OptimConfig, steps: int) -> float:
    """The factor of `optim.lr` in the step after `num_steps_done` others."""
    step, low = min(num_steps_done + 1, steps), config.min_lr_ratio
    ends = [end for end in config.decay_ends if end < steps]
    start = max((end for end in ends if end < step), default=0)
    step, steps = step - start, min((end for end in ends if end >= step), default=steps) - start  # of this period
    warmup_steps = config.restart_warmup_steps if start else config.warmup_steps
    decay_steps = min(config.decay_steps, max(steps - warmup_steps, 0))
    if step < warmup_steps:
        return low + (1.0 - low) * step / warmup_steps if start else step / warmup_steps
    if step <= steps - decay_steps:
        return 1.0
    progress = 1.0 - (steps - step) / decay_steps
    return low + (1.0 - low) * DECAY_SHAPES[config.decay](progress)
