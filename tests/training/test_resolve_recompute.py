"""What "auto" computes again is chosen once, logged once, and written into the recipe of the run."""

import logging
from pathlib import Path

import pytest
import torch

from titan_moe.config import load_recipe
from titan_moe.plan.choice.hardware import find_hardware
from titan_moe.plan.choice.recompute import choose_recompute
from titan_moe.training import resolve_recompute

RECIPES = Path(__file__).parents[2] / "recipes"
CUDA = torch.device("cuda")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A machine with eight GPUs of a name, of 80 GiB each, or 140."""
    monkeypatch.setattr(resolve_recompute, "device_name", lambda _: request.param)
    monkeypatch.setattr(resolve_recompute.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(resolve_recompute, "run_on_rank_zero", lambda choose: choose())
    properties = type("Properties", (), {"total_memory": (140 if "H200" in request.param else 80) * 2**30})
    monkeypatch.setattr(resolve_recompute.torch.cuda, "get_device_properties", lambda _: properties)


def resolved(caplog: pytest.LogCaptureFixture, name: str, *overrides: str, device: torch.device = CUDA) -> tuple:
    with caplog.at_level(logging.INFO, "titan_moe"):
        recipe = resolve_recompute.resolve_recompute(load_recipe(RECIPES / f"{name}.toml", [*overrides]), device)
    return recipe.memory.recompute


@pytest.mark.parametrize("entries", [("experts",), ("norms:1", "qkv_rope"), ()])
def test_what_a_recipe_says_is_kept(caplog: pytest.LogCaptureFixture, entries: tuple[str, ...]) -> None:
    assert resolved(caplog, "qwen3_30b_a3b", f"--memory.recompute={','.join(entries)}") == entries
    assert caplog.text == ""


def test_nothing_is_computed_again_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    assert resolved(caplog, "qwen3_30b_a3b", device=torch.device("cpu")) == () and caplog.text == ""


@pytest.mark.parametrize("on_gpu", ["NVIDIA H200"], indirect=True)
def test_nothing_is_computed_again_where_all_fits(caplog: pytest.LogCaptureFixture, on_gpu: None) -> None:
    assert resolved(caplog, "qwen3_30b_a3b") == ()
    (message,) = caplog.messages
    assert message.startswith("memory.recompute on NVIDIA H200: nothing: 127 GiB at the peak of a step fit the 133 ")


@pytest.mark.parametrize("on_gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA X1"], indirect=True)
def test_the_choice_of_the_plan_is_logged(caplog: pytest.LogCaptureFixture, on_gpu: None) -> None:
    """A GPU that is not known counts with its memory, and with the rates of a known one."""
    entries = resolved(caplog, "qwen3_30b_a3b")
    hardware = resolve_recompute.hardware_of(CUDA)
    assert 79 <= hardware.memory_gib <= 80 and hardware.bf16_flops == find_hardware("NVIDIA H100").bf16_flops
    choice = choose_recompute(load_recipe(RECIPES / "qwen3_30b_a3b.toml"), 8, hardware)
    assert entries == choice.entries != ()
    assert [message.partition(": ")[2] for message in caplog.messages] == choice.lines()
    assert {record.levelno for record in caplog.records} == {logging.INFO}


@pytest.mark.parametrize("on_gpu", ["NVIDIA A100-SXM4-40GB"], indirect=True)
def test_a_step_that_fits_in_no_way_is_warned_of(caplog: pytest.LogCaptureFixture, on_gpu: None) -> None:
    assert resolved(caplog, "mixtral_8x7b") != ()
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert "do NOT fit" in caplog.messages[-1]
