"""What a CUDA graph that could not be recorded leaves behind, and its repair."""

import torch


def forget_recording(device: torch.device) -> None:
    """A spoilt recording leaves the generator in the belief that it is still recorded: nothing could draw from it."""
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
