"""The look at routing, on a tiny model on the CPU."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from titan_moe.config import RecipeError

TINY = str(Path(__file__).parents[1] / "training" / "tiny.toml")
ARGUMENTS = [TINY, "--device=cpu", "--tokens=128"]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported from its folder."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module("look_at_routing")


def test_look_at_routing(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    dense, moe = tool.main([*ARGUMENTS, "--set", "parallel.ep=2", "parallel.dispatcher=alltoall"])
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 6 and out[2].split()[0] == "0" and out[3].split()[0] == "1"
    assert out[5].startswith("routing at the start: busiest expert") and "overload of ranks avg" in out[5]
    assert dense.router is None and dense.tokens_per_expert_E is None
    assert moe.tokens_per_expert_E.sum() == 128 * 2 and moe.router.rms == pytest.approx(1, abs=1e-3)


def test_look_at_small_and_large_embeddings(tool: ModuleType) -> None:
    small, large = (tool.main([*ARGUMENTS, "--set", f"model.embedding_init_std={std}"]) for std in (0.02, 1.0))
    assert [layers[0].residual.rms for layers in (small, large)] == pytest.approx([0.02, 1.0], rel=0.05)
    assert small[1].router.common_in_sequence > 2 * large[1].router.common_in_sequence


@pytest.mark.parametrize("settings", [["model.embeddings_are_tied=true"], ["model.embedding_multiplier=4.0"]])
def test_look_at_the_first_layers(tool: ModuleType, settings: list[str]) -> None:
    whole = tool.main([*ARGUMENTS, "--set", *settings])
    first = tool.main([*ARGUMENTS, "--set", *settings, "--layers=1"])
    assert first == whole[:1], "the same weights and tokens"


def test_look_at_bf16_weights_of_a_recipe_with_torchs_adamw(tool: ModuleType) -> None:
    settings = ["--set", "precision.compute=bf16", "precision.master=fp32", "optim.kind=adamw"]
    assert len(tool.main([*ARGUMENTS, *settings])) == 2


def test_a_recipe_that_cannot_be(tool: ModuleType) -> None:
    with pytest.raises(RecipeError, match="model.hidden_size"):
        tool.main([*ARGUMENTS, "--set", "model.hidden_size=0"])
