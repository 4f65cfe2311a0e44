"""Compilation by recipe and device."""

import pytest

from titan_moe.config.perf import CompileConfig


@pytest.mark.parametrize(
    ("regional", "compiles"), [("on", ["cpu", "cuda"]), ("on_cuda", ["cuda"]), ("off", [])], ids=str
)
def test_compile_follows_the_recipe_and_the_device(regional: str, compiles: list[str]) -> None:
    config = CompileConfig(regional)
    assert [device for device in ("cpu", "cuda") if config.compiles(device)] == compiles
    assert not config.compiles_blocks("cuda"), "blocks are compiled in pieces by default"
    whole = CompileConfig(regional, extent="block")
    assert [device for device in ("cpu", "cuda") if whole.compiles_blocks(device)] == compiles
