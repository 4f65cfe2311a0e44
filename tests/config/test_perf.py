"""Compilation by recipe and device."""

import pytest

from titan_moe.config.perf import CompileConfig


@pytest.mark.parametrize(
    ("regional", "compiles"), [("on", ["cpu", "cuda"]), ("on_cuda", ["cuda"]), ("off", [])], ids=str
)
def test_compile_follows_the_recipe_and_the_device(regional: str, compiles: list[str]) -> None:
    assert [device for device in ("cpu", "cuda") if CompileConfig(regional).compiles(device)] == compiles
