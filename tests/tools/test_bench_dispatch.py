"""The benchmark of dispatchers at a tiny size over gloo: comparisons, figures, and failures of single jobs."""

import importlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
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

pytestmark = pytest.mark.slow

TOOLS = str(Path(__file__).parents[2] / "tools")
TASKS = {
    "dispatch": ("alltoall", "allgather", "hierarchical", "torchtitan"),
    "layer": ("alltoall",),
    "check": ("allgather", "hierarchical", "torchtitan"),
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported from its folder."""
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
    with patch.object(worker, "build_with_stub_experts", partial(build_wrong, worker.build_with_stub_experts)):
        results["check"]["wrong"] = worker.check("allgather", case, cpu, 3)
    return results


def build_wrong(build: Any, name: str, case: Any, *args: Any) -> Any:
    """Dispatchers other than `alltoall`, with exchanged scores for one routing."""
    run, is_wrong = build(name, case, *args), name != "alltoall" and case.routing == "skewed"
    return lambda x_TD, ids_TK, scores_TK: run(x_TD, ids_TK, scores_TK.flip(1) if is_wrong else scores_TK)


@contextmanager
def torchtitan_on_cpus() -> Iterator[None]:
    """Make torchtitan's layer run on CPUs: histc is missing for integers there, and its permute is a Triton kernel."""
    utils, histc = import_torchtitan("models.moe.utils"), torch.histc

    def float_histc(x: Tensor, **options: int) -> Tensor:
        return histc(x.float(), **options).to(x.dtype)

    permute = partial(utils.generate_permute_indices, use_cpu=True)
    with patch.object(torch, "histc", float_histc), patch.object(utils, "generate_permute_indices", permute):
        yield


def count_rows(routing: str) -> tuple[int, int]:
    """Rows for other ranks, counted by the tool and by a loop over tokens."""
    sys.path.insert(0, TOOLS)
    candidates = importlib.import_module("dispatch_candidates")
    case = tiny(candidates, routing=routing)
    ids_TK = candidates.draw_choices(case, torch.device("cpu"))
    expected = sum(len({expert // 4 for expert in ids} - {dist.get_rank()}) for ids in ids_TK.tolist())
    return candidates.count_remote_rows(case, ids_TK), expected


def test_dispatch_candidates_agree_and_are_timed(ranks, bench: ModuleType) -> None:
    results, others = ranks(2, run_on_host)
    assert results["check"]["allgather"]["agrees"] and results["check"]["hierarchical"]["agrees"], results["check"]
    assert results["check"]["torchtitan"]["agrees"], results["check"]
    assert results["check"] == others["check"] and len(results["check"]["allgather"]["distances"]) == 5
    wrong = results["check"].pop("wrong")
    failed = [routing for routing, error in wrong["distances"].items() if error > 1e-3]
    assert not wrong["agrees"] and failed == ["skewed"]
    candidates = importlib.import_module("dispatch_candidates")
    for task, names in TASKS.items():
        lines = list(bench.describe(task, tiny(candidates), 2, results[task]))
        assert [line.split()[0] for line in lines if line.split()[0] in names] == list(names)
        assert "64 tokens per GPU, d 16, 2 of 8 experts of 8, random routing" in lines[0]


@pytest.mark.parametrize("routing", ["random", "balanced", "skewed", "one_rank_empty", "all_to_one_rank"])
def test_dispatch_remote_rows_are_counted_once_per_rank(ranks, routing: str) -> None:
    counts = ranks(2, count_rows, routing)
    assert all(counted == expected for counted, expected in counts)
    if routing == "all_to_one_rank":
        assert [counted for counted, _ in counts] == [0, 64]


def test_dispatch_report_has_rates_ratios_and_failures(bench: ModuleType) -> None:
    case = replace(bench.QWEN3, routing="skewed")
    timed = {"remote_bytes": 300e6, "device": "NVIDIA H200", "torch": "2.11"}
    results = {
        "alltoall": timed | {"forward_ms": 3.0, "total_ms": 6.0},
        "symm_mem": timed | {"forward_ms": 2.5, "total_ms": 5.0, "captured_forward_ms": 2.0, "captured_total_ms": 4.0},
        "torchtitan": {"error": "stopped after 300 s"},
    }
    lines = list(bench.describe("dispatch", case, 8, results))
    assert lines[0].startswith("dispatch: 8 x NVIDIA H200, torch 2.11; 16,384 tokens per GPU, d 2048, 8 of 128 experts")
    assert lines[1] == "300 MB of rows per GPU are for other GPUs"
    assert "3.000 ms   200 GB/s" in lines[2] and "x" not in lines[2]
    assert lines[4].startswith("symm_mem, captured") and "300 GB/s" in lines[4] and "1.50/1.50 x alltoall" in lines[4]
    assert lines[5].split(maxsplit=1) == ["torchtitan", "failed: stopped after 300 s"] and "280 GB/s" in lines[6]
    flops = 6 * 16_384 * 8 * 2048 * 768
    layer = {"symm_mem": {"forward_ms": flops / 250e9, "total_ms": 3 * flops / 250e9}}
    assert "250/250 TFLOP/s" in list(bench.describe("layer", case, 8, layer))[1]
    wrong = {"symm_mem": {"agrees": False, "distances": {"random": 0.5}}}
    assert list(bench.describe("check", case, 8, wrong))[1].endswith("DIFFERS from alltoall: random 5.0e-01")


SCRIPT = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {tools!r})
from rank_processes import append_result, reporting_errors
out, jobs = Path(sys.argv[-1].partition("=")[2]), sys.argv[3:-1]
with Path({launches!r}).open("a") as launches:
    launches.write(" ".join(jobs) + chr(10))
with reporting_errors(out, jobs):
    if "no start" in jobs:
        raise LookupError("no such device")
    for job in jobs:
        with reporting_errors(out, [job]):
            if job == "hang":
                time.sleep(60)
            if job == "die":
                os._exit(3)
            if job == "fail":
                raise MemoryError("no room" + chr(10) + "at all")
            append_result(out, [job], {{"process": os.getpid()}})
            if job == "fail late":
                raise ValueError("this came after the figures")
"""


@pytest.fixture
def run_jobs(bench: ModuleType, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    """Run jobs in a script of one rank. Returns the results, and the jobs of each launch."""
    script, launches = tmp_path / "script.py", tmp_path / "launches"
    script.write_text(SCRIPT.format(tools=TOOLS, launches=str(launches)))
    launcher = [sys.executable, "-c", "import sys; exec(open(sys.argv[2]).read())"]  # after --nproc

    def run(*jobs: str, timeout_s: float = 60.0) -> tuple[dict[str, Any], list[str]]:
        results = list(bench.run_jobs([str(script)], jobs, 1, timeout_s, launcher))
        assert [job for job, _ in results] == list(jobs), "each job once, in order"
        return dict(results), launches.read_text().splitlines()

    return run


def test_jobs_after_a_failure_or_hang_run_in_new_processes(run_jobs: Any) -> None:
    results, launches = run_jobs("a", "b", "fail", "c", "hang", "fail late", "die", "d", timeout_s=5.0)
    assert launches == ["a b fail c hang fail late die d", "c hang fail late die d", "fail late die d", "die d", "d"]
    assert {job: result["error"] for job, result in results.items() if "error" in result} == {
        "fail": "MemoryError: no room",
        "hang": "stopped after 5 s",
        "die": "exit code 3",
    }
    processes = [results[job]["process"] for job in ("a", "b", "c", "fail late", "d")]
    assert processes[0] == processes[1] and len(set(processes)) == 4


def test_jobs_that_cannot_start_are_launched_once(run_jobs: Any) -> None:
    results, launches = run_jobs("a", "no start", "b")
    assert launches == ["a no start b"]
    assert list(results.values()) == [{"error": "LookupError: no such device"}] * 3


@pytest.mark.few()
def test_dispatch_benchmark_runs_all_tasks_in_one_launch(bench: ModuleType, tmp_path: Path) -> None:
    """Two tasks with two candidates each."""
    script, out = f"{TOOLS}/bench_dispatch.py", tmp_path / "results.json"
    options = ["--smoke", "--nproc=2", "--calls=2", "--routing=skewed", "--timeout=120", f"--out={out}"]
    options += ["--tasks", "layer", "dispatch", "--candidates", "alltoall", "allgather"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    stdout = subprocess.run(
        [sys.executable, script, *options], check=True, capture_output=True, text=True, env=environment
    ).stdout.splitlines()
    results = json.loads(out.read_text())
    names = ["alltoall", "allgather"]
    assert {task: list(task_results) for task, task_results in results.items()} == {"layer": names, "dispatch": names}
    for task, task_results in results.items():
        assert not [name for name in names if "error" in task_results[name]]
        assert task_results["alltoall"]["forward_ms"] > 0 and task_results["alltoall"]["device"] == "CPU"
        progress = [f"{task} {name}: done" for name in names]
        first = stdout.index(progress[0])
        heading = stdout[first + 3]
        assert stdout[first : first + 2] == progress
        assert heading.startswith(f"{task}: 2 x CPU, torch {torch.__version__}")
        assert "skewed routing, kernels grouped_mm" in heading


def test_cleanup_frees_memory_and_graphs(ranks) -> None:
    assert ranks(1, free_a_layer) == [(True, False)]
    assert ranks(1, free_graphs) == [[False, True, False]]


def free_a_layer() -> tuple[bool, bool]:
    """Whether a layer in a reference cycle exists before and after `free_memory`."""
    sys.path.insert(0, TOOLS)
    cleanup, candidates = importlib.import_module("cleanup"), importlib.import_module("dispatch_candidates")
    layer = candidates.build_layer("alltoall", tiny(candidates), torch.device("cpu"), torch.float32)
    layer(torch.ones(1, 64, 16)).sum().backward()
    layer.cycle = [layer]
    reference = weakref.ref(layer)
    del layer
    before = reference() is not None
    cleanup.free_memory(torch.device("cpu"))
    return before, reference() is not None


def free_graphs() -> list[bool]:
    """Whether each graph of a function is dynamic: the first, that of a second size, and the first of the next job."""
    sys.path.insert(0, TOOLS)
    graphs = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(any(isinstance(size, torch.SymInt) for size in inputs))
        return graph

    double = torch.compile(lambda x: x * 2, backend=backend)
    double(torch.ones(4)), double(torch.ones(5))
    importlib.import_module("cleanup").free_memory(torch.device("cpu"))
    double(torch.ones(6))
    return graphs


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs at least two GPUs")
def test_dispatch_candidates_agree_on_gpus(tmp_path: Path) -> None:
    num_ranks = 2 ** (min(torch.cuda.device_count(), 8).bit_length() - 1)
    options = [f"--nproc={num_ranks}", "--tokens=256", "--calls=3", f"--out={tmp_path / 'results.json'}"]
    tasks = ["--tasks", "check", "dispatch", "layer"]
    subprocess.run([sys.executable, f"{TOOLS}/bench_dispatch.py", *options, *tasks], check=True)  # one launch
    results = json.loads((tmp_path / "results.json").read_text())
    assert {name: result.get("agrees") for name, result in results["check"].items()} == {
        "allgather": True,
        "symm_mem": True,
        "hierarchical": True,
        "hierarchical_symm_mem": True,
        "torchtitan": True,
    }, results["check"]
    failures = [(task, name) for task in results for name, result in results[task].items() if "error" in result]
    assert failures == [] and "captured_total_ms" in results["dispatch"]["symm_mem"]
