"""The kernels of `auto` are chosen once, logged once, and written into the recipe of the run."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titan_moe.config import load_recipe
from titan_moe.config.kernels import PRESETS
from titan_moe.config.perf import PerfConfig
from titan_moe.plan.choice.hardware import Capability
from titan_moe.training import resolve_auto

TINY = Path(__file__).with_name("tiny.toml")
RECIPES = Path(__file__).parents[2] / "recipes"


def test_auto_kernels_on_a_cpu_are_logged_and_recorded(tiny, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny("--train.steps=1")
    with caplog.at_level(logging.INFO, "titan_moe"):
        assert run.train() == 0
    assert 'perf.kernels = "auto" on CPU: "grouped_mm"' in caplog.messages
    assert load_recipe(run.folder / "recipe.toml").perf.kernels == "grouped_mm"


def test_auto_kernels_keep_a_named_preset(caplog: pytest.LogCaptureFixture) -> None:
    recipe = load_recipe(TINY, ["--perf.kernels=reference"])
    with caplog.at_level(logging.INFO, "titan_moe"):
        assert resolve_auto.resolve_kernels(recipe, torch.device("cpu")) is recipe
    assert caplog.text == ""


def test_auto_kernels_of_an_unknown_gpu_use_its_compute_capability(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resolve_auto.torch.cuda, "get_device_name", lambda *_: "NVIDIA X1")
    monkeypatch.setattr(resolve_auto.torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(resolve_auto.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(resolve_auto, "run_on_rank_zero", lambda choose: choose())
    recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml", ["--parallel.ep=4"])
    with caplog.at_level(logging.INFO, "titan_moe"):
        perf = resolve_auto.resolve_kernels(recipe, torch.device("cuda")).perf
    assert perf.kernels == "fused" and perf.chosen_kernels == PRESETS["fused"]
    assert caplog.messages == ['perf.kernels = "auto" on NVIDIA X1: "fused"']


def resolved_on_a_rank() -> PerfConfig:
    def capability(device: torch.device) -> Capability:
        """Only rank 0's GPU decides; those of other ranks may differ."""
        assert dist.get_rank() == 0
        return (9, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve_auto, "compute_capability", capability)
        words = ["--run.device=auto", "--precision.compute=bf16"]
        return resolve_auto.resolve_kernels(load_recipe(TINY, words), torch.device("cpu")).perf


def test_auto_kernels_of_all_ranks_are_those_of_rank_0(ranks) -> None:
    assert [perf.kernels for perf in ranks(2, resolved_on_a_rank)] == ["fused", "fused"]
