"""torch's AdamW (arXiv:1711.05101) with a guard and clipping on the device."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from titan_moe.optim.state import make_state, put_lr_on_device
from titan_moe.parameters import local


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW; parameter, gradient and moments are in one dtype.

    A step computes on local shards: an update is elementwise, and DTensor would find a sharding for each of its lists.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        capturable: bool = False,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, capturable=capturable, fused=True)
        make_state(self)
        if capturable:
            put_lr_on_device(self)

    @torch.no_grad()
    def step(self, *, found_inf: Tensor | None = None, grad_factor: Tensor | None = None) -> None:
        """As `Optimizers.step`."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            grads = [local(parameter.grad) for parameter in parameters]
            if grad_factor is not None:
                # not torch's `grad_scale`: it divides, which rounds differently
                torch._foreach_mul_(grads, grad_factor)
            states = [self.state[parameter] for parameter in parameters]
            firsts, seconds = ([local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
            beta1, beta2 = group["betas"]
            adamw(
                [local(parameter) for parameter in parameters],
                grads,
                firsts,
                seconds,
                [],
                [state["step"] for state in states],
                fused=True,
                capturable=group["capturable"],
                found_inf=found_inf,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
