"""torch's AdamW (arXiv:1711.05101) with a guard and clipping on the device."""

from typing import Any

import torch
from torch import Tensor

from titan_moe.optim.state import make_state, put_lr_on_device
from titan_moe.parameters import local


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW; parameter, gradient and moments are in one dtype."""

    def __init__(self, groups: list[dict[str, Any]], *, capturable: bool = False, **options: Any) -> None:
        super().__init__(groups, capturable=capturable, fused=True, **options)
        make_state(self)
        if capturable:
            put_lr_on_device(self)

    @torch.no_grad()
    def step(self, *, found_inf: Tensor | None = None, grad_factor: Tensor | None = None) -> None:
        """As `Optimizers.step`."""
        if grad_factor is not None:
            parameters = (parameter for group in self.param_groups for parameter in group["params"])
            grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
            # not torch's `grad_scale`: it divides, which rounds differently
            torch._foreach_mul_(grads, grad_factor)
        self.found_inf = found_inf  # torch's fused kernel reads it
        super().step()
