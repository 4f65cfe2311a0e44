"""Which implementation of each operation a recipe chooses."""

from dataclasses import fields
from typing import get_args, get_type_hints

from titan_moe.config.kernels import DEFAULT_KERNELS, PRESETS, KernelOverrides, Kernels, choose_kernels
from titan_moe.config.perf import PerfConfig


def test_kernel_override_changes_one_operation() -> None:
    chosen = PerfConfig(kernels="fused", override=KernelOverrides(router="torch", experts="reference")).chosen_kernels
    assert (chosen.router, chosen.experts, chosen.rotary) == ("torch", "reference", "triton")
    assert choose_kernels("grouped_mm", KernelOverrides()) == DEFAULT_KERNELS


def test_kernel_preset_fused_is_all_triton() -> None:
    backends = {field.name: getattr(PRESETS["fused"], field.name) for field in fields(KernelOverrides)}
    assert backends.pop("experts") == "fused" and set(backends.values()) == {"triton"}


def test_kernel_presets_are_the_values_of_the_recipe() -> None:
    assert set(get_args(get_type_hints(PerfConfig)["kernels"])) == set(PRESETS)


def test_kernel_overrides_have_the_backends_that_exist() -> None:
    exist, overrides = get_type_hints(Kernels), get_type_hints(KernelOverrides)
    assert exist.pop("attention"), "perf.attention chooses it"
    assert list(exist) == [field.name for field in fields(KernelOverrides)]
    for name, backends in exist.items():
        assert get_args(overrides[name]) == ("no", *get_args(backends))
