"""What the measurements on several ranks have in common: the slowest rank counts, and a result names its device."""

import torch
import torch.distributed as dist

from titan_moe.kernels.device import device_name


def max_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """The maximum of each value over ranks: the slowest rank determines the time of a step."""
    maxima = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return maxima.tolist()


def facts_of(device: torch.device) -> dict[str, str]:
    """The device and the torch version of a result."""
    return {"device": device_name(device), "torch": str(torch.__version__)}
