"""A device is known by the name that its driver reports."""

import pytest

from titan_moe.plan.hardware import CAPABILITIES, KNOWN_DEVICES, Capability, find_capability, find_hardware


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


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA H200 NVL", (9, 0)),
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA H100 PCIe", (9, 0)),
        ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA H800", (9, 0)),
        ("NVIDIA H20", (9, 0)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GB200", (10, 0)),
        ("NVIDIA B300 SXM6 AC", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("CPU", None),
    ],
)
def test_hardware_capability_by_name(name: str, capability: Capability | None) -> None:
    assert find_capability(name) == capability


def test_hardware_has_a_capability_for_every_device() -> None:
    assert all(find_capability(" ".join(known.words)) in CAPABILITIES for known in KNOWN_DEVICES)


@pytest.mark.parametrize("name", ["cpu", "", "NVIDIA GeForce RTX 4090", "NVIDIA GB200"])
def test_hardware_of_unknown_devices_is_none(name: str) -> None:
    assert find_hardware(name) is None
