"""Sums of gradients that are kept unsharded for a step."""

import torch
from torch import Tensor
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

from titan_moe.parallel.fsdp import _zeros_like


def test_sums_of_gradients_of_codes_are_plain() -> None:
    """A weight that was gathered in fp8 has no `zeros_like`."""
    codes = hp_tensor_to_float8_dynamic(torch.randn(4, 8), torch.float8_e4m3fn, LinearMMConfig())
    zeros = _zeros_like(codes, torch.float32)
    assert type(zeros) is Tensor and torch.equal(zeros, torch.zeros(4, 8))
