"""fp32 masters in two parts: every bit comes back; AdamW on them has the bits of AdamW on fp32 masters."""

from typing import Any

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.optim.adamw import Rule, Shard, adamw_reference, launch_adamw
from titan_moe.kernels.optim.adamw_8bit import Shard8, adamw_8bit_reference, launch_adamw_8bit
from titan_moe.kernels.optim.moments_8bit import NEAREST, quantize_reference
from titan_moe.kernels.optim.split_master import merge_reference, split_reference

TIE = 0x3F80_8000
"""The bits of a number between two in bf16."""
DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


def test_a_split_master_is_exact_and_its_weight_the_nearest_one() -> None:
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).int()
    masters = bits.view(torch.float32)
    masters = masters[masters.isfinite()]
    weights, remainders = split_reference(masters)
    assert (weights.dtype, remainders.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(merge_reference(weights, remainders).view(torch.int32), masters.view(torch.int32))
    is_tie = (masters.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weights[~is_tie], masters[~is_tie].bfloat16())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ends_of_the_range_and_ties(sign: float) -> None:
    bits = [0, 1, TIE, TIE + 0x1_0000, 0x7F7F_FFFF, 0x7F80_0000]
    masters = sign * torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    weights, remainders = split_reference(masters)
    assert torch.equal(merge_reference(weights, remainders).view(torch.int32), masters.view(torch.int32))
    assert torch.equal(weights.float(), sign * torch.tensor([0, 0, 1 + 2**-7, 1 + 2**-6, torch.inf, torch.inf]))


def test_what_is_no_number_stays_none() -> None:
    bits = torch.tensor([0x7FFF_FFFF, 0x7F80_0001, -1, -0x7F_FFFF], dtype=torch.int32)
    assert bits.view(torch.float32).isnan().all()
    weights, remainders = split_reference(bits.view(torch.float32))
    assert weights.isnan().all() and merge_reference(weights, remainders).isnan().all()


def rule_of(lr: float, found_inf: float, device: str) -> Rule:
    values = (torch.tensor(value, device=device) for value in (lr, found_inf, 0.5))
    return Rule(*values, 0.9, 0.95, 1e-8, 0.3)


def assert_same_masters(param: Tensor, remainder: Tensor, expected: Tensor) -> None:
    assert torch.equal(merge_reference(param, remainder), expected)


UPDATES = [pytest.param(adamw_reference, "cpu", id="reference")] + [
    pytest.param(launch_adamw, *device.values, marks=device.marks, id=f"triton-{device.values[0]}")
    for device in DEVICES
]


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("update", "device"), UPDATES)
def test_adamw_on_split_masters_has_the_bits_of_fp32(update: Any, device: str, moments: torch.dtype) -> None:
    """Fifty steps, one of which is skipped."""
    torch.manual_seed(0)
    master = torch.randn(1000, device=device)
    param, remainder = split_reference(master)
    own, expected = ([torch.zeros(1000, device=device, dtype=moments) for _ in range(2)] for _ in range(2))
    for number in range(1, 51):
        step, rule = torch.tensor(float(number), device=device), rule_of(1e-3, number == 7, device)
        grad = torch.randn(1000, device=device)
        update(Shard(step, 5, master, grad, *expected), rule)
        update(Shard(step, 5, param, grad, *own, remainder), rule)
    assert_same_masters(param, remainder, master)
    assert all(torch.equal(one, other) for one, other in zip(own, expected, strict=True))


UPDATES_8BIT = [pytest.param(adamw_8bit_reference, "cpu", id="reference")] + [
    pytest.param(launch_adamw_8bit, *device.values, marks=device.marks, id=f"triton-{device.values[0]}")
    for device in DEVICES
]


@pytest.mark.parametrize(("update", "device"), UPDATES_8BIT)
def test_adamw_with_8bit_moments_on_split_masters_has_the_bits_of_fp32(update: Any, device: str) -> None:
    torch.manual_seed(0)
    master = torch.randn(3, 256, device=device)
    param, remainder = split_reference(master)
    zeros = torch.zeros(3, 256, device=device)
    own, expected = (
        [quantize_reference(zeros, NEAREST, is_signed=is_signed) for is_signed in (True, False)] for _ in range(2)
    )
    for number in range(1, 6):
        step, rule = torch.tensor(float(number), device=device), rule_of(1e-3, number == 3, device)
        grad = torch.randn(3, 256, device=device)
        update(Shard8(step, 5, master, grad, *expected), rule)
        update(Shard8(step, 5, param, grad, *own, remainder), rule)
    assert_same_masters(param, remainder, master)
