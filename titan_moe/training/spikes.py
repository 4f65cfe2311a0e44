"""Find steps whose loss or gradient norm is far above those of the steps before.

W steps of the window
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titan_moe.training.controller import DeviceController

WINDOW_STEPS = 128


class Spikes(DeviceController):
    """The losses and gradient norms of the last steps, on the device, and whether the next ones are spikes.

    A spike is above their mean by `num_sigmas` standard deviations, once half of the window is filled. The rule is that
    of OLMo-core's SkipStepOptimizer. Spikes enter the window too, so that a level that lasts is accepted after a few
    steps; values that are not finite do not.
    """

    name = "spikes"

    def __init__(self, num_sigmas: float, device: torch.device) -> None:
        self.num_sigmas = num_sigmas
        self.recent_2W = torch.zeros(2, WINDOW_STEPS, dtype=torch.float64, device=device)
        self.num_seen, self.num_spikes = torch.zeros(2, dtype=torch.int64, device=device).unbind()

    @property
    def counts(self) -> dict[str, Tensor]:
        """The spikes of this process."""
        return {"spikes": self.num_spikes}

    def follow(self, metrics: Mapping[str, Tensor]) -> Tensor:
        loss, norm, has_overflowed = metrics["loss"], metrics["grad_norm"], metrics["has_overflowed"]
        is_spike = self.find(loss, norm) & norm.isfinite() & ~has_overflowed
        self.record(loss, norm, ~has_overflowed)
        self.num_spikes.add_(is_spike)
        return is_spike

    def find(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether this step is a spike: a bool on the device."""
        num = self.num_seen.clamp(max=WINDOW_STEPS)
        is_filled_W = torch.arange(WINDOW_STEPS, device=num.device) < num
        mean_2 = self.recent_2W.sum(1) / num
        variance_2 = ((self.recent_2W - mean_2[:, None]).square() * is_filled_W).sum(1) / num
        is_above_2 = torch.stack([loss.double(), norm.double()]) > mean_2 + self.num_sigmas * variance_2.sqrt()
        return is_above_2.any() & (num >= WINDOW_STEPS // 2)

    def record(self, loss: Tensor, norm: Tensor, is_taken: Tensor) -> None:
        """Add a step to the window, unless `is_taken`, a bool on the device, is false: the step is taken again."""
        now_2 = torch.stack([loss.double(), norm.double()])
        counts = is_taken & now_2.isfinite().all()
        is_oldest_W = torch.arange(WINDOW_STEPS, device=counts.device) == self.num_seen % WINDOW_STEPS
        self.recent_2W.copy_(torch.where(is_oldest_W & counts, now_2[:, None], self.recent_2W))
        self.num_seen.add_(counts)

    def state_dict(self) -> dict[str, Any]:
        return {"recent": self.recent_2W.tolist(), "num_seen": int(self.num_seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recent_2W.copy_(torch.tensor(state["recent"], dtype=torch.float64))
        self.num_seen.fill_(state["num_seen"])
