"""The state of AdamW, there from the start and updated in place ever after."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def make_state(optimizer: torch.optim.Optimizer, moments: torch.dtype | None = None) -> None:
    """Give every parameter its step count and moments, in its own dtype or in another.

    torch makes the state at a parameter's first gradient. A checkpoint could then lack parameters that have had none
    yet, and asking for the state before the first step would take a step to make it, which counts in the bias
    correction. A captured step needs it to stay where it is, too.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            options = {"dtype": moments or parameter.dtype, "memory_format": torch.preserve_format}
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False, **options),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False, **options),
            }


def put_lr_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Turn every group's learning rate into a tensor, which a schedule fills and a captured step reads."""
    for group in optimizer.param_groups:
        device = group["params"][0].device
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)


def local(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
