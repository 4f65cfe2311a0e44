"""The benchmark of whole steps without a GPU: its candidates, its table, and one tiny run that is really timed."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from titan_moe.config import load_recipe
from titan_moe.train.process import process_group

RECIPES = Path(__file__).parents[2] / "recipes"
QWEN3, MIXTRAL = str(RECIPES / "qwen3_30b_a3b.toml"), str(RECIPES / "mixtral_8x7b.toml")
RESULT = {
    "tokens_per_second_per_gpu": 20_000.0,
    "median_step_ms": 819.2,
    "peak_memory_gib": 100.04,
    "num_reruns": 2,
    "num_skipped": 0,
    "expert_load": {"mean": 1.8, "worst": 2.25},
    "rank_load": {"mean": 1.2, "worst": 1.5},
    "device": "NVIDIA H200",
    "torch": "2.11.0",
}
TINY = """
--run.device=cpu --precision.compute=fp32 --model.num_layers=2 --model.hidden_size=32 --model.moe.ffn_hidden_size=32
--model.attention.num_heads=2 --model.attention.num_kv_heads=1 --model.attention.head_dim=16 --train.steps=4
--train.seq_len_tokens=64 --train.global_batch_sequences=32 --train.micro_batch_sequences=16
--data.source=synthetic --data.holdout_fraction=0 --validation.every_steps=0 --train.force_skewed_routing=true
""".split()


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script from where it stands."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module


@pytest.fixture
def bench(tools: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, list[list[str]]]:
    """The benchmark whose runs are only noted; those of natural routing run out of memory."""
    module, runs = tools("bench_train"), []

    def run_ranks(words: list[str], num_ranks: int, timeout_s: float) -> dict[str, Any]:
        runs.append(words)
        is_natural = "--train.force_balanced_routing=false" in words
        return {"error": "OutOfMemoryError: no room | at all"} if is_natural else RESULT

    monkeypatch.setattr(module, "run_ranks", run_ranks)
    return module, runs


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_recipe_is_run_as_given_varied_and_as_peer(bench: Any, tmp_path: Path) -> None:
    module, runs = bench
    variants = tmp_path / "variants"
    variants.write_text("# nothing\n\n--memory.recompute=experts  # more room\n")
    graph = "--compile.cudagraph=step --parallel.dispatcher=allgather"
    options = ["--nproc", "8", "--vary", graph, "--variants", str(variants), "--peer", "--peer-args", "--no-compile"]
    rows = module.main([QWEN3, MIXTRAL, *options, "--train.force_balanced_routing=true"])
    balanced = "--train.force_balanced_routing=true"
    assert [words[3:] for words in runs[:3]] == [
        ["--warmup=5", balanced],
        ["--warmup=5", balanced, *graph.split()],
        ["--warmup=5", balanced, "--memory.recompute=experts"],
    ]
    assert runs[3][1:] == [
        *("--model=qwen3_30b_a3b", "--steps=10", "--warmup=5", "--num-layers=48", "--seq=4096", "--batch=4", "--ep=8"),
        *("--forced-balance", "--no-compile"),
    ]
    assert len(runs) == 7 and len(rows) == 8, "torchtitan has no Mixtral"
    assert rows[-1].result == {"error": "torchtitan has no mixtral_8x7b"}
    assert [row.facts["overlap"] for row in rows[:4]] == ["none"] * 4
    assert rows[1].facts["dispatcher"] == "allgather, ep 8" and rows[1].facts["CUDA graph"] == "step (pieces)"


def test_rows_stay_in_a_file_with_all_that_they_depend_on(bench: Any, tools: Any, tmp_path: Path) -> None:
    module, _ = bench
    file = tmp_path / "RESULTS.md"
    file.write_text("# Results\n\nOlder ones.\n")
    options = ["--nproc=8", "--append", str(file), "--vary", "--train.force_balanced_routing=false"]
    for _ in range(2):
        module.main([QWEN3, *options, "--train.force_balanced_routing=true", "--perf.override.slots=torch"])
    text = file.read_text()
    assert text.startswith("# Results\n\nOlder ones.\n\n## 20") and text.count("whole steps, 8 × NVIDIA H200") == 2
    assert f"    python tools/bench_train.py {QWEN3} --nproc=8" in text and "torch 2.11.0; median of 10" in text
    columns = tools("result_table").COLUMNS
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(cells(line)) == len(columns) for line in lines)
    first, second = (dict(zip(columns, cells(line), strict=True)) for line in lines[2:4])
    assert [first[name] for name in ("tokens/s/GPU", "TF", "MFU", "step ms", "peak GiB")] == [
        *("20,000", "460", "46.5%", "819.2", "100.0")
    ]
    assert first["tokens a microbatch"] == "8,192" and first["microbatches"] == "2" and first["routing"] == "balanced"
    assert first["kernels"] == "auto, some overridden"
    assert first["optimizer"] == "torch; master fp32, reduce fp32, moments fp32"
    assert first["load of expert / rank"] == "1.80 / 1.20, worst 2.25 / 1.50"
    assert first["notes"] == "2 of the timed steps taken again"
    assert second["routing"] == "natural (synthetic)" and second["tokens/s/GPU"] == "–"
    assert second["notes"] == "failed: OutOfMemoryError: no room / at all"


def test_figures_are_held_against_the_first_that_ran(tools: Any) -> None:
    table = tools("result_table")
    rows = [table.Row(name, "a", RESULT | {"tokens_per_second_per_gpu": speed}) for name, speed in (("x", 0), ("y", 8))]
    rows += [table.Row("z", "a", RESULT | {"tokens_per_second_per_gpu": 6}), table.Row("other", "b", RESULT)]
    column = table.COLUMNS.index("of the first")
    assert [cells(line)[column] for line in [*table.table(rows)][2:]] == ["–", "1.00", "0.75", "1.00"]


def test_what_cannot_run_is_not_started(bench: Any) -> None:
    module, runs = bench
    rows = module.main([MIXTRAL, "--nproc=8", "--train.force_skewed_routing=true", "--vary", "--model.no_such_key=1"])
    assert runs == [] and "would be the busiest rank" in rows[0].result["error"]
    assert "model.no_such_key is not a known key" in rows[1].result["error"]


SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tools!r})
from rank_processes import telling, write_once
out = Path(sys.argv[-1].partition("=")[2])
with telling(out):
    if sys.argv[-2] == "hang":
        time.sleep(60)
    if sys.argv[-2] == "die":
        sys.exit(3)
    if sys.argv[-2] == "fail":
        raise MemoryError("no room\\nat all")
    write_once(out, {{"figure": 1}})
"""


def test_ranks_bring_figures_or_errors_home(tools: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tools=str(Path(__file__).parents[2] / "tools")))
    processes = tools("rank_processes")
    outcomes = {}
    for how in ("work", "fail", "die", "hang"):
        launcher = [processes.sys.executable, "-c", "import sys; exec(open(sys.argv[2]).read())"]  # after --nproc
        outcomes[how] = processes.run_ranks([str(script), how], 1, 1.5 if how == "hang" else 60.0, launcher)
    assert outcomes == {
        "work": {"figure": 1},
        "fail": {"error": "MemoryError: no room"},
        "die": {"error": "exit code 3"},
        "hang": {"error": "stopped after 1.5 s"},
    }


def test_a_tiny_run_is_timed(tools: Any, tmp_path: Path) -> None:
    worker = tools("time_steps")
    recipe = load_recipe(RECIPES / "quickstart.toml", TINY)
    with process_group(recipe.run) as device:
        result = worker.measure(recipe, device, 2, tmp_path)
        text = replace(recipe.data, source="text", path=str(RECIPES / "*.toml"))
        recipe = replace(recipe, data=text, train=replace(recipe.train, force_skewed_routing=False))
        natural_result = worker.measure(recipe, device, 2, tmp_path)
    assert len(result["step_ms"]) == len(result["losses"]) == 4 and result["is_finite"]
    assert result["tokens_per_second_per_gpu"] == pytest.approx(32 * 64 / result["median_step_ms"] * 1e3)
    assert result["num_reruns"] == result["num_skipped"] == 0 and result["peak_memory_gib"] > 0
    assert result["expert_load"] == pytest.approx({"mean": 1.8, "worst": 1.8}, rel=1e-2), "a microbatch is a window"
    assert result["rank_load"] == {"mean": 1.0, "worst": 1.0}, "all experts are on one rank"
    assert result["losses"][-1] < result["losses"][0]
    assert natural_result["expert_load"]["worst"] > natural_result["expert_load"]["mean"] > 1
