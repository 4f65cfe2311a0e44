"""The benchmark of loads: a tiny case over gloo, its table, and the arena in Triton's interpreter."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.slow

TOOLS = str(Path(__file__).parents[2] / "tools")
CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported from its folder."""
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("bench_loads")


def test_loads_benchmark_has_defaults_and_refuses_unknown_loads(bench: ModuleType) -> None:
    args = bench.parse(["--nproc=4", "--shape=mixtral"])
    assert args.candidates == ["alltoall", "arena", "arena_tile"] and len(args.loads) == 12
    assert bench.parse(["--smoke"]).candidates == ["alltoall", "allgather"]
    with pytest.raises(SystemExit):
        bench.parse(["--loads", "lukewarm"])


def test_loads_table_has_ratios_and_failures(bench: ModuleType) -> None:
    figures = {
        "median_ms": 2.0,
        "worst_ms": 9.0,
        "need": 1.5,
        "arena_gib": 0.5,
        "peak_gib": 3.0,
        "device": "NVIDIA H200",
    }
    results = {
        "bursts:alltoall": figures | {"mean_ms": 6.0, "num_reruns": 0, "factor": 0.0, "need": 0.0},
        "bursts:arena": figures | {"mean_ms": 3.0, "num_reruns": 2, "factor": 1.625},
        "one_rank:arena": {"error": "OutOfMemoryError: 1|2"},
    }
    heading, _, columns, rule, *rows = bench.describe(results, bench.SHAPES["qwen3"], 8, 4, 20)
    assert heading.startswith("8 x NVIDIA H200") and "8 of 128 experts of 768" in heading
    assert {line.count("|") for line in (columns, rule, *rows)} == {len(bench.COLUMNS) + 1}
    assert rows[0].startswith("| bursts | alltoall | 6.00 | 2.00 | 9.00 | 1.00 | – | – |")
    assert rows[1] == "| bursts | arena | 3.00 | 2.00 | 9.00 | 2.00 | 2 | 1.50 | 1.62 | 0.50 | 3.00 |"
    assert "failed: OutOfMemoryError: 1/2" in rows[2]


@pytest.mark.few()
def test_loads_benchmark_runs_on_the_host(bench: ModuleType, tmp_path: Path) -> None:
    options = ["--smoke", "--nproc=2", "--layers=2", "--steps=3", "--loads", "bursts", f"--out={tmp_path / 'out.json'}"]
    stdout = subprocess.run(
        [sys.executable, f"{TOOLS}/bench_loads.py", *options],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ).stdout
    results = json.loads((tmp_path / "out.json").read_text())
    assert list(results) == ["bursts:alltoall", "bursts:allgather"]
    assert all(0 < result["median_ms"] <= result["worst_ms"] for result in results.values())
    bounded = results["bursts:allgather"]
    assert bounded["num_reruns"] == 1 and bounded["need"] == 2 and bounded["factor"] > 2, "the burst is a timed step"
    assert "| bursts | allgather |" in stdout


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs at least two GPUs")
def test_loads_benchmark_runs_on_gpus(tmp_path: Path) -> None:
    num_ranks = 2 ** (min(torch.cuda.device_count(), 8).bit_length() - 1)
    options = [f"--nproc={num_ranks}", "--tokens=512", "--layers=2", "--steps=4", f"--out={tmp_path / 'results.json'}"]
    command = [sys.executable, f"{TOOLS}/bench_loads.py", *options, "--loads", "bursts", "one_rank"]
    subprocess.run(command, check=True)  # one launch
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == 6 and not [job for job, result in results.items() if "error" in result], results
    assert results["bursts:arena_tile"]["num_reruns"] == 1 and results["one_rank:arena"]["num_reruns"] == 0
