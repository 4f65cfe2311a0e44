"""A device is known by the name that its driver reports."""

import pytest

from titan_moe.plan.choice.hardware import find_hardware


@pytest.mark.parametrize(
    ("name", "bf16_flops"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
    ],
)
def test_hardware_of_known_devices(name: str, bf16_flops: float) -> None:
    hardware = find_hardware(name)
    assert hardware is not None and hardware.bf16_flops == bf16_flops


def test_hardware_variants_differ_by_memory() -> None:
    small, large = find_hardware("NVIDIA A100-SXM4-40GB"), find_hardware("NVIDIA A100-SXM4-80GB")
    assert small is not None and large is not None and (small.memory_gib, large.memory_gib) == (39, 79)


@pytest.mark.parametrize("name", ["cpu", "", "NVIDIA GeForce RTX 4090", "NVIDIA GB200"])
def test_hardware_of_unknown_devices_is_none(name: str) -> None:
    assert find_hardware(name) is None
