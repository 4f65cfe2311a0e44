"""The state of AdamW, allocated at the start and updated in place."""

from collections.abc import Callable

import torch
from torch import Tensor

from titan_moe.optim.moments_8bit import new_moment

MOMENTS = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
}
"""`precision.moments_dtype` -> the dtype that names it here."""


def make_state(
    optimizer: torch.optim.Optimizer,
    moments: torch.dtype | None = None,
    place: Callable[[Tensor], Tensor] = lambda moment: moment,
) -> None:
    """Allocate step count and moments of every parameter, in its dtype or in `moments`, where `place` puts these.

    torch allocates them at a parameter's first gradient. A checkpoint could then lack parameters without gradients so
    far, and reading the state before the first step would take a step, which counts in the bias correction. A captured
    step also needs fixed addresses.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": place(_zeros(parameter, moments or parameter.dtype)),
                "exp_avg_sq": place(_zeros(parameter, moments or parameter.dtype)),
            }


def _zeros(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float8_e4m3fn:
        return new_moment(parameter)
    return torch.zeros_like(parameter, requires_grad=False, dtype=dtype, memory_format=torch.preserve_format)


def put_lr_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Make every group's learning rate a tensor, which a schedule fills and a captured step reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            continue  # that of an optimizer within this one
        device = group["params"][0].device
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
