"""What the driver says of a device: by its name and compute capability, kernels and formats are chosen."""

import torch

from titan_moe.plan.hardware import Capability


def device_name(device: torch.device) -> str:
    """`NVIDIA H200`; `CPU` for any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def num_multiprocessors(device: torch.device) -> int | None:
    """Multiprocessors that this process may use, a part of a GPU's under the Multi-Process Service; None for any other
    device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else None


def compute_capability(device: torch.device) -> Capability | None:
    """CUDA compute capability; None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
