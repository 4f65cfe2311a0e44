"""The benchmark of dispatch at a tiny size, over gloo: what it compares agrees, what it times has a line."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.titan import import_torchtitan

TOOLS = str(Path(__file__).parents[2] / "tools")
TASKS = {
    "dispatch": ("alltoall", "allgather", "torchtitan"),
    "layer": ("alltoall",),
    "check": ("allgather", "torchtitan"),
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported from where it stands."""
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("bench_dispatch")


def tiny(candidates: ModuleType, **changes: Any) -> Any:
    return candidates.Case(64, 16, 8, experts=8, choices=2, kernels="grouped_mm", **changes)


def run_on_host() -> dict[str, dict[str, dict[str, Any]]]:
    """All tasks of this rank."""
    sys.path.insert(0, TOOLS)
    worker, candidates = importlib.import_module("time_dispatch"), importlib.import_module("dispatch_candidates")
    cpu, case = torch.device("cpu"), tiny(candidates)
    with torchtitan_on_cpus():
        results = {
            task: {name: worker.TASKS[task](name, case, cpu, 3) for name in names} for task, names in TASKS.items()
        }
    with patch.object(worker, "build_server", partial(slightly_wrong, worker.build_server)):
        results["check"]["wrong"] = worker.check("allgather", case, cpu, 3)
    return results


def slightly_wrong(build: Any, name: str, case: Any, *place: Any) -> Any:
    """Servers that weigh the rows of one routing by each other's scores, but for `alltoall`."""
    serve, is_wrong = build(name, case, *place), name != "alltoall" and case.routing == "skewed"
    return lambda x_TD, ids_TK, scores_TK: serve(x_TD, ids_TK, scores_TK.flip(1) if is_wrong else scores_TK)


@contextmanager
def torchtitan_on_cpus() -> Iterator[None]:
    """It counts tokens with an operation that CPUs have for floats only, and permutes in a Triton kernel."""
    utils, histc = import_torchtitan("models.moe.utils"), torch.histc

    def counted(x: Tensor, **options: int) -> Tensor:
        return histc(x.float(), **options).to(x.dtype)

    permute = partial(utils.generate_permute_indices, use_cpu=True)
    with patch.object(torch, "histc", counted), patch.object(utils, "generate_permute_indices", permute):
        yield


def count_rows(routing: str) -> tuple[int, int]:
    """Rows that others want by the tool's count, and by one over tokens in Python."""
    sys.path.insert(0, TOOLS)
    candidates = importlib.import_module("dispatch_candidates")
    case = tiny(candidates, routing=routing)
    ids_TK = candidates.draw_choices(case, torch.device("cpu"))
    by_hand = sum(len({expert // 4 for expert in ids} - {dist.get_rank()}) for ids in ids_TK.tolist())
    return candidates.count_remote_rows(case, ids_TK), by_hand


def test_everybody_agrees_and_is_timed(ranks, bench: ModuleType) -> None:
    results, others = ranks(2, run_on_host)
    assert results["check"]["allgather"]["agrees"] and results["check"]["torchtitan"]["agrees"], results["check"]
    assert results["check"] == others["check"] and len(results["check"]["allgather"]["distances"]) == 5
    wrong = results["check"].pop("wrong")
    assert not wrong["agrees"] and [way for way, far in wrong["distances"].items() if far > 1e-3] == ["skewed"]
    candidates = importlib.import_module("dispatch_candidates")
    for task, names in TASKS.items():
        said = list(bench.describe(task, tiny(candidates), 2, results[task]))
        assert [line.split()[0] for line in said if line.split()[0] in names] == list(names)
        assert "64 tokens a GPU, d 16, 2 of 8 experts of 8, random routing" in said[0]


@pytest.mark.parametrize("routing", ["random", "balanced", "skewed", "one_rank_empty", "all_to_one_rank"])
def test_remote_rows_are_counted_once_a_rank(ranks, routing: str) -> None:
    answers = ranks(2, count_rows, routing)
    assert all(counted == by_hand for counted, by_hand in answers)
    if routing == "all_to_one_rank":
        assert [counted for counted, _ in answers] == [0, 64]


def test_rates_ratios_and_failures_are_lines(bench: ModuleType) -> None:
    case = replace(bench.QWEN3, routing="skewed")
    timed = {"remote_bytes": 300e6, "device": "NVIDIA H200", "torch": "2.11"}
    results = {
        "alltoall": timed | {"forward_ms": 3.0, "total_ms": 6.0},
        "symm_mem": timed | {"forward_ms": 2.5, "total_ms": 5.0, "captured_forward_ms": 2.0, "captured_total_ms": 4.0},
        "torchtitan": {"error": "stopped after 300 s"},
    }
    said = list(bench.describe("dispatch", case, 8, results))
    assert said[0].startswith("dispatch: 8 x NVIDIA H200, torch 2.11; 16,384 tokens a GPU, d 2048, 8 of 128 experts")
    assert said[1] == "300 MB of a GPU's rows are wanted by others"
    assert "3.000 ms   200 GB/s" in said[2] and "x" not in said[2]
    assert said[4].startswith("symm_mem, captured") and "300 GB/s" in said[4] and "1.50/1.50 x alltoall" in said[4]
    assert said[5].split(maxsplit=1) == ["torchtitan", "failed: stopped after 300 s"] and "280 GB/s" in said[6]
    flops = 6 * 16_384 * 8 * 2048 * 768
    layer = {"symm_mem": {"forward_ms": flops / 250e9, "total_ms": 3 * flops / 250e9}}
    assert "250/250 TFLOP/s" in list(bench.describe("layer", case, 8, layer))[1]
    wrong = {"symm_mem": {"agrees": False, "distances": {"random": 0.5}}}
    assert list(bench.describe("check", case, 8, wrong))[1].endswith("DIFFERS from alltoall: random 5.0e-01")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs at least two GPUs")
def test_everybody_agrees_on_gpus(tmp_path: Path) -> None:
    num_ranks = 2 ** (min(torch.cuda.device_count(), 8).bit_length() - 1)
    options = [f"--nproc={num_ranks}", "--tokens=256", "--calls=3", f"--out={tmp_path / 'results.json'}"]
    tasks = ["--tasks", "check", "dispatch", "layer"]
    subprocess.run([sys.executable, f"{TOOLS}/bench_dispatch.py", *options, *tasks], check=True)
    results = json.loads((tmp_path / "results.json").read_text())
    assert {name: result.get("agrees") for name, result in results["check"].items()} == {
        "allgather": True,
        "symm_mem": True,
        "torchtitan": True,
    }, results["check"]
    failures = [(task, name) for task in results for name, result in results[task].items() if "error" in result]
    assert failures == [] and "captured_total_ms" in results["dispatch"]["symm_mem"]
