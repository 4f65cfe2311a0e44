"""The state of AdamW, allocated at the start and updated in place."""

import torch


def make_state(optimizer: torch.optim.Optimizer, moments: torch.dtype | None = None) -> None:
    """Allocate step count and moments of every parameter, in its dtype or in `moments`.

    torch allocates them at a parameter's first gradient. A checkpoint could then lack parameters without gradients so
    far, and reading the state before the first step would take a step, which counts in the bias correction. A captured
    step also needs fixed addresses.
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
    """Make every group's learning rate a tensor, which a schedule fills and a captured step reads."""
    for group in optimizer.param_groups:
        device = group["params"][0].device
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
