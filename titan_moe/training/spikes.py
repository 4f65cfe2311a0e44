"""Find steps whose loss or gradient norm is far above those of the steps before.

W steps of the window
"""

import json

import torch
from torch import Tensor

WINDOW_STEPS = 128


class Spikes:
    """The losses and gradient norms of the last steps, on the device, and whether the next ones are spikes.

    A spike is above their mean by `num_sigmas` standard deviations, once half of the window is filled. The rule is that
    of OLMo-core's SkipStepOptimizer. Spikes enter the window too, so that a level that lasts is accepted after a few
    steps; values that are not finite do not. Losses and norms are reduced over ranks: all ranks decide alike.
    """

    def __init__(self, num_sigmas: float, device: torch.device) -> None:
        self.num_sigmas = num_sigmas
        self.recent_2W = torch.zeros(2, WINDOW_STEPS, dtype=torch.float64, device=device)
        self.num_seen = torch.zeros((), dtype=torch.int64, device=device)

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

    def state(self) -> str:
        """The window as JSON. Waits for the device."""
        return json.dumps({"recent": self.recent_2W.tolist(), "num_seen": int(self.num_seen)})

    def load_state(self, state: str) -> None:
        """Go on with the window of an earlier run; an empty string is one without."""
        if state:
            loaded = json.loads(state)
            self.recent_2W.copy_(torch.tensor(loaded["recent"], dtype=torch.float64))
            self.num_seen.fill_(loaded["num_seen"])
