"""Clean-up after a failed CUDA graph capture."""

import torch


def forget_recording(device: torch.device) -> None:
    """Replace the generator's state: after a failed capture it still counts as captured, and any draw raises."""
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
