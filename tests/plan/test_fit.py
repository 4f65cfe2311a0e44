"""A recipe whose estimated peak exceeds the memory of a known GPU is warned of, with what fits."""

import re
from pathlib import Path

import pytest

from titan_moe.config import load_recipe
from titan_moe.plan.check_report import describe
from titan_moe.plan.hardware import gpus_here

QWEN3 = Path(__file__).parents[2] / "recipes" / "qwen3_30b_a3b.toml"


def warnings_of(monkeypatch: pytest.MonkeyPatch, gpus: list[str], *overrides: str, num_ranks: int = 8) -> list[str]:
    monkeypatch.setattr("titan_moe.plan.check_report.gpus_here", lambda: gpus)
    lines = describe(load_recipe(QWEN3, [*overrides]), num_ranks).splitlines()
    return [line.strip() for line in lines if "WARNING" in line]


def test_peak_is_compared_with_the_gpus_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warnings_of(monkeypatch, ["NVIDIA H200"]) == []
    assert warnings_of(monkeypatch, ["NVIDIA H200"], "--run.device=cpu", "--parallel.ep=1") == []
    assert warnings_of(monkeypatch, ["Some GPU"]) == [], "its memory is not known"
    gpus = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "Some GPU"]
    (warning,) = warnings_of(monkeypatch, gpus, "--compile.cudagraph=off")
    assert "GiB exceed the 79 GiB of NVIDIA H100 80GB HBM3; with " in warning
    assert 'memory.recompute = "experts" 77' in warning and 'memory.recompute = "block" ' in warning
    assert "micro_batch_sequences" not in warning, "half of 4 sequences is still too much"


def test_the_peak_that_exceeds_is_the_one_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_moe.plan.check_report.gpus_here", lambda: ["NVIDIA H200"])
    overrides = ["--parallel.pp=4", "--train.micro_batch_sequences=16", "--train.global_batch_sequences=512"]
    text = describe(load_recipe(QWEN3, [*overrides, "--parallel.pp_schedule=1f1b"]), 32)
    (exceeds,) = re.findall(r"WARNING: (\S+) GiB exceed", text)
    of_ranks = re.findall(r"about (\S+) GiB at the peak\n", text)
    assert re.findall(r"about (\S+) GiB at the peak of a step", text) == [exceeds] and exceeds in of_ranks


def test_peak_is_compared_with_measured_gpus_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = warnings_of(monkeypatch, [], "--parallel.ep=4", "--compile.cudagraph=off", num_ranks=4)
    assert "exceed the 139 GiB of NVIDIA H200" in warning and "train.micro_batch_sequences = 2 13" in warning
    assert "precision.moments" not in warning, "moments in int8 alone do not fit"


def test_a_launched_step_may_fit_where_a_graph_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = warnings_of(monkeypatch, [], "--parallel.ep=4", "--model.num_layers=38", num_ranks=4)
    assert 'with compile.cudagraph = "off" 13' in warning
    report = describe(load_recipe(QWEN3), 8)
    assert re.search(r"at the peak of a step, [2-4]\.\d+ GiB more than without a CUDA graph", report)
    launched = describe(load_recipe(QWEN3, ["--compile.cudagraph=off"]), 8)
    assert "at the peak of a step;" in launched and "without a CUDA graph" not in launched


def test_an_arena_of_one_layer_has_room_for_all_factors() -> None:
    one, two = (describe(load_recipe(QWEN3, [f"--model.num_layers={number}"]), 8) for number in (1, 2))
    assert "GiB in the arena of rows\n" in one and "GiB more for each eighth" in two


def test_peak_is_compared_with_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_moe.plan.check_report.gpus_here", lambda: ["NVIDIA H200"])
    recipe = load_recipe(QWEN3)
    assert "GiB exceed the 79 GiB of H100; with " in describe(recipe, 8, "H100")
    assert "GiB fit the 139 GiB of h200" in describe(recipe, 8, "h200")
    on_cpus = load_recipe(QWEN3.with_name("quickstart.toml"))
    assert 'not compared with H100: run.device = "cpu"' in describe(on_cpus, 1, "H100")


def test_ranks_of_a_gpu_need_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    alltoall = ("--parallel.dispatcher=alltoall", "--parallel.overlap=none", "--compile.cudagraph=off")
    shared = ("--run.ranks_per_gpu=2", *alltoall)
    one = warnings_of(monkeypatch, ["NVIDIA H200"], *alltoall, "--train.micro_batch_sequences=2")
    (two,) = warnings_of(monkeypatch, ["NVIDIA H200"], *shared, "--train.micro_batch_sequences=2")
    assert one == [] and "run.ranks_per_gpu = 1 " in two


def test_a_recipe_that_no_single_change_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = warnings_of(monkeypatch, ["NVIDIA A100-SXM4-40GB"])
    assert warning.endswith("no single change fits: take more ranks, or fewer layers")


def test_gpus_here_are_those_of_the_driver(tmp_path: Path) -> None:
    assert gpus_here(tmp_path / "absent") == []
    for number, name in enumerate(["NVIDIA H200", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"]):
        folder = tmp_path / f"0000:{number}b:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 18\nVideo BIOS: \t 96.00\n")
    assert gpus_here(tmp_path) == ["NVIDIA A100-SXM4-80GB", "NVIDIA H200"]
