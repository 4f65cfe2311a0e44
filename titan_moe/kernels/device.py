"""What the driver says of a device: kernels and formats are chosen by its compute capability."""

import torch
from torch import Tensor
from triton import knobs

from titan_moe.plan.choice.hardware import Capability


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


def refuse_cpu(x: Tensor, field: str, choice: str, instead: str = "torch") -> None:
    """Refuse a kernel in Triton for a tensor on a CPU, where only the interpreter of tests runs it.

    Raises: ValueError with the field of `config.kernels.Kernels` that chose it, and a way out.
    """
    if x.device.type == "cpu" and not knobs.runtime.interpret:
        raise ValueError(
            f'kernels.{field} = "{choice}" is in Triton, which does not run on a CPU; move the model to a GPU, or take '
            f'kernels.{field} = "{instead}"'
        )
