"""Weights & Biases, with a stand-in for its package that records calls."""

import logging
import sys
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from titan_moe.config import Recipe, RecipeError
from titan_moe.config.train import MetricsConfig, RunConfig
from titan_moe.metrics import weights_and_biases
from titan_moe.metrics.meter import Meter
from titan_moe.metrics.weights_and_biases import WeightsAndBiases, require_wandb

RECIPE = Recipe(metrics=MetricsConfig(wandb=True, wandb_project="mine"), run=RunConfig(seed=3))
IMAGE = np.zeros((4, 4), np.uint8)


class StandIn(SimpleNamespace):
    """Has what is used of `wandb`, and of a run of it; `failing` is a call that raises."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self.failing = failing
        self.Settings = self.Image = lambda *args, **options: options or "image"

    def _call(self, name: str, value: Any = None) -> None:
        self.calls.append((name, value))
        if name == self.failing:
            raise ConnectionError("no network")

    def init(self, **options: Any) -> "StandIn":
        self._call("init", options)
        return self

    def define_metric(self, *names: str, **options: Any) -> None:
        self._call("define_metric", (*names, options))

    def log(self, values: dict[str, Any]) -> None:
        self._call("log", values)

    def finish(self) -> None:
        self._call("finish")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> StandIn:
    stand_in = StandIn(getattr(request, "param", ""))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return stand_in


def log_a_step(folder: Path) -> None:
    output = WeightsAndBiases(RECIPE, folder)
    output.write({"step": 7, "loss": 1.5, "lr": 0.1, "mfu": None})
    output.write_loads(IMAGE, 7)
    output.write({"step": 7, "validation_loss": 2.0})
    output.close()
    output.write({"step": 8, "loss": 1.0})  # after its end nothing is logged


def test_wandb_gets_every_number_with_its_step(package: StandIn, tmp_path: Path) -> None:
    log_a_step(tmp_path)
    names, values = zip(*package.calls, strict=True)
    assert names == ("init", "define_metric", "define_metric", "log", "log", "log", "finish")
    options = values[0]
    assert (options["project"], options["name"], options["dir"]) == ("mine", tmp_path.name, str(tmp_path))
    assert options["config"]["run.seed"] == 3 and options["resume"] == "allow"
    assert values[2] == ("*", {"step_metric": "step"})
    assert values[3] == {"step": 7, "loss": 1.5, "optim/lr": 0.1}
    assert values[4:6] == ({"step": 7, "moe/loads": "image"}, {"step": 7, "validation_loss": 2.0})


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(package: StandIn, tmp_path: Path) -> None:
    for folder in ("one", "one", "two"):
        (tmp_path / folder).mkdir(exist_ok=True)
        log_a_step(tmp_path / folder)
    first, resumed, other = (value["id"] for name, value in package.calls if name == "init")
    assert first == resumed != other


@pytest.mark.parametrize("package", ["init", "define_metric", "log", "finish"], indirect=True)
def test_a_failure_of_wandb_is_one_warning(package: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_a_step(tmp_path)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "(ConnectionError: no network); the run goes on without it" in caplog.text
    assert [name for name, _ in package.calls].count(package.failing) == 1, "nothing more is tried"


def test_an_end_that_takes_long_is_not_waited_for(
    package: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_network = Event()
    monkeypatch.setattr(weights_and_biases, "END_S", 0.01)
    monkeypatch.setattr(package, "finish", has_network.wait, raising=False)
    log_a_step(tmp_path)
    has_network.set()
    assert f"they are in {tmp_path / 'wandb'}: `wandb sync` sends them" in caplog.text


def test_a_missing_package_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, package: StandIn) -> None:
    require_wandb()
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(RecipeError, match="metrics.wandb = true needs the package wandb.*pip install wandb"):
        require_wandb()


@pytest.mark.parametrize("is_main", [True, False])
def test_only_the_first_rank_logs(package: StandIn, tmp_path: Path, is_main: bool) -> None:
    recipe = Recipe(metrics=MetricsConfig(wandb=True, tensorboard=False, progress_bar=False))
    options: dict[str, Any] = {"flops_per_token": None, "num_ranks": 2, "peak_memory_gib": lambda: 1.0}
    meter = Meter(recipe, tmp_path, device=torch.device("cpu"), is_main=is_main, **options)
    meter.start(0, 0)
    counts = {"layers.1.moe": torch.tensor([1, 3])}
    names = ("loss", "grad_norm", "aux_loss", "skipped_steps")
    meter.log(1, metrics={name: torch.tensor(1.0) for name in names}, tokens_per_expert=counts, num_tokens=4)
    meter.close()
    logged = [set(values) for name, values in package.calls if name == "log"]
    assert [("loss" in names, "moe/loads" in names) for names in logged] == [(True, False), (False, True)] * is_main
    assert bool(package.calls) == (tmp_path / "wandb_id").exists() == is_main
