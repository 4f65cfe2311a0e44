"""The measurements that the package has."""

from dataclasses import fields
from typing import get_args

from titan_moe.config.formats import Format
from titan_moe.config.kernels import PRESETS, KernelOverrides
from titan_moe.plan.choice.hardware import find_hardware
from titan_moe.plan.choice.kernel_table import read_tables

KERNELS = {field.name for field in fields(KernelOverrides)}


def test_tables_are_of_known_devices() -> None:
    assert "NVIDIA H200" in read_tables()
    assert all(find_hardware(device) for device in read_tables())


def test_measurements_are_complete() -> None:
    for entries in read_tables().values():
        assert {entry.operation for entry in entries} == KERNELS | {"experts_in_formats", "linear_in_formats"}
        for entry in entries:
            known = (
                get_args(Format)
                if entry.operation.endswith("_in_formats")
                else ("torch", "triton", "grouped_mm", "fused")
            )
            assert set(entry.ms) <= set(known) and len(entry.ms) > 1 and min(entry.ms.values()) > 0
            assert entry.shape and all(size > 0 for size in entry.shape.values() if isinstance(size, int))
            assert entry.torch and entry.triton and len(entry.date) == 10


def test_fused_kernels_won_every_measurement() -> None:
    """What `perf.kernels = "auto"` takes on Hopper; the compared ones are PyTorch's."""
    for entries in read_tables().values():
        for entry in entries:
            if entry.operation in KERNELS:
                fused, plain = (getattr(PRESETS[name], entry.operation) for name in ("fused", "grouped_mm"))
                assert entry.ms[fused] < 0.98 * entry.ms[plain], entry
