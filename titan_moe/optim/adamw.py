"""torch's AdamW (arXiv:1711.05101), with the guard and the clipping of our steps."""

from typing import Any

import torch
from torch import Tensor

from titan_moe.optim.state import local, make_state, put_lr_on_device


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW; parameter, gradient and moments are in one dtype."""

    def __init__(self, groups: list[dict[str, Any]], *, capturable: bool = False, **options: Any) -> None:
        super().__init__(groups, capturable=capturable, fused=True, **options)
        make_state(self)
        if capturable:
            put_lr_on_device(self)

    @torch.no_grad()
    def step(self, *, found_inf: Tensor | None = None, grad_factor: Tensor | None = None) -> None:
        """Update all parameters that have a gradient; `Optimizers.step` says what the guard means."""
        if grad_factor is not None:
            parameters = (parameter for group in self.param_groups for parameter in group["params"])
            grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
            # torch would divide by `grad_scale` instead, which rounds otherwise than clipping always did
            torch._foreach_mul_(grads, grad_factor)
        self.found_inf = found_inf  # the kernels of torch look for it here
        super().step()
