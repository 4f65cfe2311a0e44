"""The kernels of a run are chosen once, said once, and written into its recipe."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titan_moe.config import RecipeError, load_recipe
from titan_moe.config.kernels import Kernels
from titan_moe.config.perf import PerfConfig
from titan_moe.plan.kernel_choice import KernelChoice
from titan_moe.train import resolve_kernels

TINY = Path(__file__).with_name("tiny.toml")
RECIPES = Path(__file__).parents[2] / "recipes"


def test_resolve_kernels_on_a_cpu_records_the_default(tiny, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny("--train.steps=1")
    with caplog.at_level(logging.INFO, "titan_moe"):
        assert run.train() == 0
    said = 'perf.kernels = "auto" on CPU: experts grouped_mm, permute torch, router torch, rotary torch, head'
    assert said in caplog.text and "(a CPU has no Triton)" in caplog.text
    assert load_recipe(run.folder / "recipe.toml").perf.kernels == "grouped_mm"


def test_resolve_kernels_keeps_a_named_preset(caplog: pytest.LogCaptureFixture) -> None:
    recipe = load_recipe(TINY, ["--perf.kernels=reference"])
    with caplog.at_level(logging.INFO, "titan_moe"):
        assert resolve_kernels.resolve_kernels(recipe, torch.device("cpu")) is recipe
    assert caplog.text == ""


def test_resolve_kernels_of_an_unknown_gpu_by_capability(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(resolve_kernels.torch.cuda, "get_device_name", lambda *_: "NVIDIA X1")
    monkeypatch.setattr(resolve_kernels.torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(resolve_kernels.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(resolve_kernels, "run_on_rank_zero", lambda choose: choose())
    recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml", ["--parallel.ep=4"])
    with caplog.at_level(logging.INFO, "titan_moe"):
        kernels = resolve_kernels.resolve_kernels(recipe, torch.device("cuda")).perf.chosen_kernels
    assert (kernels.experts, kernels.permute, kernels.router) == ("fused", "triton", "triton")
    assert 'perf.kernels = "auto" on NVIDIA X1: experts fused (' in caplog.text
    assert re.search(r"permute triton \(.* measured on NVIDIA H200 at the nearest shape, x\d\.\d+ away: ", caplog.text)


def resolved_on_a_rank() -> PerfConfig:
    def choose_for(*_: object) -> list[KernelChoice]:
        """Only the main rank may ask its tables: others' may differ."""
        assert dist.get_rank() == 0
        return [KernelChoice("experts", "reference", "measured")]

    resolve_kernels.choose_for = choose_for
    return resolve_kernels.resolve_kernels(load_recipe(TINY), torch.device("cpu")).perf


def test_resolve_kernels_takes_the_choice_of_rank_0(ranks) -> None:
    expected = replace(load_recipe(TINY).perf, kernels="grouped_mm")
    for perf in ranks(2, resolved_on_a_rank):
        assert (
            perf.chosen_kernels == Kernels(experts="reference")
            and replace(perf, override=expected.override) == expected
        )


def refused_on_a_rank() -> list[str]:
    def choose_for(*_: object) -> list[KernelChoice]:
        assert dist.get_rank() == 0
        raise RecipeError(["a table that", "cannot be read"])

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RecipeError) as refused:
        patch.setattr(resolve_kernels, "choose_for", choose_for)
        resolve_kernels.resolve_kernels(load_recipe(TINY, []), torch.device("cpu"))
    return refused.value.problems


def test_resolve_kernels_error_of_rank_0_reaches_all_ranks(ranks) -> None:
    assert ranks(2, refused_on_a_rank) == [["a table that", "cannot be read"]] * 2
