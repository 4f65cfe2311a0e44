"""Seed torch's generators and, on request, allow deterministic algorithms only."""

import os

import torch


def set_determinism(seed: int, is_deterministic: bool) -> None:
    """Seed every torch generator alike on all ranks, and allow or forbid operations without a deterministic form.

    torchtitan's function of this name also seeds DTensor's own tracker over its own mesh class and compiles flex
    attention; our weights and data draw from generators of their own, so neither is wanted here.
    """
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(is_deterministic)
    torch.backends.cudnn.deterministic = is_deterministic
    if is_deterministic:
        torch.backends.cudnn.benchmark = False
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when its first handle is made
