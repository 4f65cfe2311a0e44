"""`titan-moe tune`, with backends and a stopwatch of the test. Real measurements need a GPU."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_moe import cli
from titan_moe.config import Recipe, RecipeError, load_recipe
from titan_moe.config.kernels import PRESETS
from titan_moe.kernels.registry import Kernel, Sample, Tunable, load_all
from titan_moe.kernels.timing import Stopwatch, forward_and_total_ms
from titan_moe.plan.kernel_choice import as_overrides, choose_for
from titan_moe.plan.kernel_shapes import FORMAT_OPERATIONS, shapes_of
from titan_moe.plan.kernel_table import KernelTable, cached_tables, read_table, write_table
from titan_moe.train import tune

CPU = torch.device("cpu")
RECIPES = Path(__file__).parents[2] / "recipes"
GPU = "Fast GPU"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    overrides = ["--run.device=auto", "--precision.compute=bf16", "--train.seq_len_tokens=16"]
    return load_recipe(RECIPES / "quickstart.toml", overrides)


def plain(x_SD: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x_SD * 2, torch.zeros(3, dtype=torch.int64)


def broken(*args: Any) -> Tensor:
    raise RuntimeError("not on this device")


def set_backends(monkeypatch: pytest.MonkeyPatch, **candidates: Callable[..., Any]) -> None:
    """Replace the backends of the experts, and remove all other operations."""

    def draw(shape: Any, device: torch.device) -> Sample:
        return Sample("", (torch.randn(shape["rows"], shape["width"], device=device),), 1)

    kernel = Kernel("mlp", plain, plain, tunable=Tunable("experts", candidates, draw))
    monkeypatch.setattr(tune, "load_all", lambda: {"mlp": kernel})


def stopwatch() -> Callable[[Callable[[], Any]], float]:
    """Calls the function and returns 1, 2, 3, ..."""
    ticks: Iterator[int] = count(1)

    def time(call: Callable[[], Any]) -> float:
        call()
        return float(next(ticks))

    return time


def test_tune_times_forward_and_backward(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    set_backends(monkeypatch, grouped_mm=plain, fused=plain)
    (entry,) = tune.measure(recipe, 1, CPU, stopwatch())
    assert entry.ms == {"grouped_mm": 2.0, "fused": 4.0}, "the first time of each is forward alone"
    assert (entry.operation, entry.shape) == ("experts", shapes_of(recipe, 1)["experts"])
    assert torch.__version__.startswith(entry.torch)


def test_tune_non_differentiable_operation_has_one_time() -> None:
    sample = Sample("", (torch.ones(3),), 0)
    assert forward_and_total_ms(lambda x: x + 1, sample, stopwatch()) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("--model.moe.score_on=input", "experts: nothing to choose"),
        ("--precision.compute=fp32", "experts: nothing to choose"),
        ("", "experts fused fails, so nothing is written: RuntimeError: not on this device"),
    ],
)
def test_tune_does_not_write_an_incomplete_comparison(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, overrides: str, message: str
) -> None:
    set_backends(monkeypatch, grouped_mm=plain, fused=broken)
    argv = ["--run.device=auto", "--precision.compute=bf16", "--train.seq_len_tokens=16", *overrides.split()]
    with caplog.at_level(logging.INFO, "titan_moe"):
        assert list(tune.measure(load_recipe(RECIPES / "quickstart.toml", argv), 1, CPU, stopwatch())) == []
    assert message in caplog.text


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, device: torch.device = CPU, watch: Stopwatch | None = None) -> None:
    """Use another device as a GPU."""
    real = tune.measure
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune.torch.cuda, "get_device_name", lambda *_: GPU)
    monkeypatch.setattr(tune.torch.cuda, "get_device_capability", lambda *_: (0, 0))
    monkeypatch.setattr(tune, "measure", lambda recipe, ranks, _: real(recipe, ranks, device, watch or stopwatch()))


def test_tune_result_is_used_by_auto(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend_gpu(monkeypatch)
    set_backends(monkeypatch, fused=plain, grouped_mm=plain)
    assert choose_for(recipe, 1, GPU)[0].backend == "grouped_mm"
    with caplog.at_level(logging.INFO, "titan_moe"):
        tune.run(recipe, 1)
    assert choose_for(recipe, 1, GPU)[0].backend == "fused"
    assert f"experts fused (2 ms fused, 4 ms grouped_mm, measured on {GPU} at 128 rows" in caplog.text
    path = cached_tables() / "fast_gpu.toml"
    before = read_table(path)
    tune.run(recipe, 1)
    assert len(read_table(path).measured) == len(before.measured) == 1, (
        "a new measurement replaces that of the same shape"
    )


def test_tune_table_must_be_of_this_device(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_gpu(monkeypatch)
    set_backends(monkeypatch, fused=plain, grouped_mm=plain)
    tune.run(recipe, 1, tmp_path / "mine.toml")
    assert read_table(tmp_path / "mine.toml").device == GPU and not cached_tables().exists()
    write_table(tmp_path / "other.toml", KernelTable("Slow GPU"))
    with pytest.raises(RecipeError, match="is a table of Slow GPU, but this is Fast GPU; give another file with --out"):
        tune.run(recipe, 1, tmp_path / "other.toml")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("device", "cause"), [("cpu", 'run.device = "cpu"'), ("auto", "PyTorch finds no GPU")])
def test_tune_refuses_a_cpu(device: str, cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", str(RECIPES / "quickstart.toml"), f"--run.device={device}"]) == 2
    assert f"{cause}, and there is nothing to measure on a CPU" in capsys.readouterr().err


def countdown() -> Callable[[Callable[[], Any]], float]:
    """Calls the function and returns a shorter time at every call, so later backends are faster."""
    ticks: Iterator[int] = count(1)

    def time(call: Callable[[], Any]) -> float:
        call()
        return 1.0 / next(ticks)

    return time


def test_tune_measures_all_operations(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The real backends, on meta tensors."""
    pretend_gpu(monkeypatch, torch.device("meta"), countdown())
    with caplog.at_level(logging.INFO, "titan_moe"):
        tune.run(recipe, 1)
    table = read_table(cached_tables() / "fast_gpu.toml")
    assert {entry.operation: entry.shape for entry in table.measured} == shapes_of(recipe, 1)
    assert as_overrides(recipe.perf, choose_for(recipe, 1, GPU)).chosen_kernels == replace(
        PRESETS["fused"], gradients="triton"
    )
    timed = [line for line in caplog.messages if line.endswith("ms forward and backward")]
    assert len(timed) == 12 and all(len(line) < 80 for line in timed), "one short line per backend"


def test_tune_failing_operation_does_not_stop_the_others(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def draw(shape: Any, device: torch.device) -> Sample:
        raise RuntimeError("no memory\nfor that " + 100 * "much ")

    kernels = load_all()
    broken = Tunable("permute", {"torch": plain, "triton": plain}, draw)
    kernel = replace(kernels["counting_sort"], tunable=broken)
    monkeypatch.setattr(tune, "load_all", lambda: kernels | {"counting_sort": kernel})
    with caplog.at_level(logging.INFO, "titan_moe"):
        measured = list(tune.measure(recipe, 1, torch.device("meta"), countdown()))
    assert [entry.operation for entry in measured] == ["experts", "router", "rotary", "head", "gradients"]
    (line, _) = [line for line in caplog.messages if "permute" in line]
    assert line.startswith("permute torch fails, so nothing is written: RuntimeError: no memory for that much")
    assert len(line) < 320 and line.endswith(" ...")


def test_tune_results_survive_a_crash(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    set_backends(monkeypatch, fused=plain, grouped_mm=plain)
    real = tune.measure

    def measure(*args: Any) -> Iterator[Any]:
        yield from real(*args)
        raise SystemExit("the device is gone")

    monkeypatch.setattr(tune, "measure", measure)
    with pytest.raises(SystemExit):
        tune.run(recipe, 1)
    assert [entry.operation for entry in read_table(cached_tables() / "fast_gpu.toml").measured] == ["experts"]


@pytest.mark.gpu
def test_tune_small_model(recipe: Recipe) -> None:
    tune.run(recipe, 1)
    (path,) = cached_tables().iterdir()
    assert {entry.operation for entry in read_table(path).measured} - FORMAT_OPERATIONS.keys() == (
        shapes_of(recipe, 1).keys()
    )
    assert all(min(entry.ms.values()) > 0 for entry in read_table(path).measured)
