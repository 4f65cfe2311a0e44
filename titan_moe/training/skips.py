"""Skip steps whose gradients are not finite, and count them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titan_moe.training.controller import DeviceController


class Skips(DeviceController):
    """Steps without finite gradients. One that overflowed is not counted: it is taken again."""

    name = "skips"

    def __init__(self, device: torch.device) -> None:
        self.num_skipped, self.num_in_row = torch.zeros(2, dtype=torch.int64, device=device).unbind()

    @property
    def counts(self) -> dict[str, Tensor]:
        """Those of this process, and those since the last step with finite gradients, also of an earlier process."""
        return {"skipped_steps": self.num_skipped, "skipped_in_row": self.num_in_row}

    def follow(self, metrics: Mapping[str, Tensor]) -> Tensor:
        is_void, has_overflowed = ~metrics["grad_norm"].isfinite(), metrics["has_overflowed"]
        self.num_skipped.add_(is_void & ~has_overflowed)
        self.num_in_row.copy_(torch.where(has_overflowed, self.num_in_row, (self.num_in_row + 1) * is_void))
        return is_void

    def state_dict(self) -> dict[str, Any]:
        return {"num_in_row": int(self.num_in_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_in_row.fill_(state["num_in_row"])
