"""The benchmark of whole steps without a GPU: its candidates, its table, and one tiny timed run."""

import importlib
import json
import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from titan_moe.config import RecipeError, load_recipe
from titan_moe.config.context import sequence_shard
from titan_moe.config.parallel import resolve
from titan_moe.data.packing import Batch
from titan_moe.parallel.mesh import build_meshes
from titan_moe.plan.cost.count import count_parameters
from titan_moe.run.process import process_group
from titan_moe.training.trainer import run as train

pytestmark = pytest.mark.slow

TOOLS = Path(__file__).parents[2] / "tools"
RECIPES = Path(__file__).parents[2] / "recipes"
QUICKSTART = str(RECIPES / "quickstart.toml")
QWEN3, MIXTRAL = str(RECIPES / "qwen3_30b_a3b.toml"), str(RECIPES / "mixtral_8x7b.toml")
RESULT = {
    "tokens_per_second_per_gpu": 20_000.0,
    "median_step_ms": 819.2,
    "peak_memory_gib": 100.04,
    "num_reruns": 2,
    "num_warmup_reruns": 3,
    "num_recordings": 1,
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
--data.source=synthetic --data.holdout_fraction=0 --validation.every_steps=0 --train.forced_load=skewed
--metrics.sample_tokens=0
""".split()


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script from its folder."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module


@pytest.fixture
def bench(tools: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, list[list[str]]]:
    """The benchmark with fake runs, and the list of their commands. Runs with natural routing fail."""
    module, runs = tools("bench_train"), []

    def run_ranks(command: list[str], num_ranks: int, timeout_s: float) -> dict[str, Any]:
        runs.append(command)
        return RESULT

    def run_jobs(command: list[str], jobs: list[str], num_ranks: int, timeout_s: float) -> Iterator[tuple[str, Any]]:
        runs.append([*command, *jobs])
        for job in jobs:
            is_natural = "--train.forced_load=none" in json.loads(job)["overrides"]
            yield job, {"error": "OutOfMemoryError: no room | at all"} if is_natural else RESULT

    monkeypatch.setattr(module, "run_ranks", run_ranks)
    monkeypatch.setattr(module, "run_jobs", run_jobs)
    return module, runs


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_train_benchmark_takes_both_routings(bench: Any) -> None:
    module, runs = bench
    rows = module.main([QWEN3, "--nproc=8", "--peer", "--vary", "--compile.cudagraph=step"])
    forced = "--train.forced_load=balanced"
    assert [json.loads(job)["overrides"] for job in runs[0][3:]] == [
        *([], ["--compile.cudagraph=step"]),
        *([forced], [forced, "--compile.cudagraph=step"]),
    ]
    assert [command[-1] for command in runs[1:]] == ["--natural", "--forced-balance"]
    assert [row.name for row in rows] == [
        f"qwen3_30b_a3b {routing}{name}"
        for routing in ("natural", "forced")
        for name in ("", ", compile.cudagraph=step", ", torchtitan")
    ]
    assert [row.facts["routing"] for row in rows] == ["natural (synthetic)"] * 3 + ["balanced"] * 3


def test_train_benchmark_runs_recipes_variants_and_peers(bench: Any, tmp_path: Path) -> None:
    module, runs = bench
    variants = tmp_path / "variants"
    variants.write_text("# nothing\n\n--memory.recompute=experts  # more room\n")
    graph = "--compile.cudagraph=step --parallel.dispatcher=allgather --parallel.overlap=none"
    options = ["--nproc", "8", "--vary", graph, "--variants", str(variants), "--peer", "--peer-args", "--no-compile"]
    rows = module.main([QWEN3, MIXTRAL, *options, "--train.forced_load=balanced"])
    balanced = "--train.forced_load=balanced"
    assert [command[1] for command in runs[1:]] == ["--model=qwen3_30b_a3b"], "one launch for this package"
    jobs = [json.loads(job) for job in runs[0][3:]]
    assert runs[0][1:3] == ["--steps=10", "--warmup=10"]
    assert [job["recipe"] for job in jobs] == [QWEN3] * 3 + [MIXTRAL] * 3
    assert [job["overrides"] for job in jobs] == 2 * [
        [balanced],
        [balanced, *graph.split()],
        [balanced, "--memory.recompute=experts"],
    ]
    assert runs[1][1:] == [
        *("--model=qwen3_30b_a3b", "--steps=10", "--warmup=10", "--num-layers=48", "--seq=4096", "--batch=4", "--ep=8"),
        *("--forced-balance", "--no-compile"),
    ]
    names = ["", f", {graph.replace('--', '')}", ", memory.recompute=experts", ", torchtitan"]
    assert [row.name for row in rows] == [
        f"{stem}{name}" for stem in ("qwen3_30b_a3b", "mixtral_8x7b") for name in names
    ]
    assert rows[-1].result == {"error": "torchtitan has no mixtral_8x7b"}
    assert [row.facts["overlap"] for row in rows[:4]] == ["tile", "none", "tile", "none"]
    assert rows[1].facts["dispatcher"] == "allgather, ep 8" and rows[1].facts["CUDA graph"] == "step (compiled)"


def test_train_benchmark_appends_rows_to_a_file(bench: Any, tools: Any, tmp_path: Path) -> None:
    module, _ = bench
    file = tmp_path / "steps.md"
    file.write_text("# Results\n\nOlder ones.\n")
    options = ["--nproc=8", "--append", str(file), "--vary", "--train.forced_load=none"]
    for _ in range(2):
        module.main([QWEN3, *options, "--train.forced_load=balanced", "--perf.override.permute=torch"])
    text = file.read_text()
    assert text.startswith("# Results\n\nOlder ones.\n\n### 20") and text.count("whole steps, 8 × NVIDIA H200") == 2
    assert f"    python tools/bench_train.py {QWEN3} --nproc=8" in text and "torch 2.11.0; median of 10" in text
    columns = tools("result_table").COLUMNS
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(cells(line)) == len(columns) for line in lines)
    first, second = (dict(zip(columns, cells(line), strict=True)) for line in lines[2:4])
    assert [first[name] for name in ("tokens/s/GPU", "TF", "MFU", "step ms", "peak GiB")] == [
        *("20,000", "460", "46.5%", "819.2", "100.0")
    ]
    assert first["tokens a microbatch"] == "16,384" and first["microbatches"] == "1" and first["routing"] == "balanced"
    assert first["kernels"] == "auto, some overridden"
    assert first["optimizer"] == "fused_adamw; master fp32, reduce fp32, moments bf16"
    assert first["load of expert / rank"] == "1.80 / 1.20, worst 2.25 / 1.50"
    assert first["clones"] == "2" and first["dispatcher"] == "symm_mem, ep 8"
    assert first["notes"] == (
        "2 of the timed steps rerun, 3 of the warm-up; "
        "graphs recorded in the timed steps: 1; steps before them are launched"
    )
    assert second["routing"] == "natural (synthetic)" and second["tokens/s/GPU"] == "–"
    assert second["notes"] == "failed: OutOfMemoryError: no room / at all"


def test_result_table_compares_with_the_first_row_with_figures(tools: Any) -> None:
    table = tools("result_table")
    rows = [table.Row(name, "a", RESULT | {"tokens_per_second_per_gpu": speed}) for name, speed in (("x", 0), ("y", 8))]
    rows += [table.Row("z", "a", RESULT | {"tokens_per_second_per_gpu": 6}), table.Row("other", "b", RESULT)]
    column = table.COLUMNS.index("of the first")
    assert [cells(line)[column] for line in [*table.table(rows)][2:]] == ["–", "1.00", "0.75", "1.00"]


PIPELINE = "--parallel.pp=4 --parallel.ep=2 --train.micro_batch_sequences=2"


def test_train_benchmark_gives_the_peer_the_same_pipeline(bench: Any) -> None:
    module, runs = bench
    zbv = "--parallel.pp_schedule=zbv --parallel.vpp=2 --parallel.accumulate_unsharded=true"
    options = ["--nproc=8", "--peer", "--routings=natural", *PIPELINE.split(), *zbv.split()]
    rows = module.main([QWEN3, *options, "--vary", "--parallel.vpp=1 --parallel.pp_schedule=1f1b"])
    assert {"--batch=16", "--pp=4", "--pp-schedule=ZBVZeroBubble", "--microbatches=8"} <= set(runs[-1])
    assert [row.facts["microbatches"] for row in rows] == ["8", "8", "8"]
    assert [row.facts["tokens a microbatch"] for row in rows] == ["8,192"] * 3
    bubbles = [row.facts["pipeline"].partition(", bubble ") for row in rows]
    assert [name for name, _, _ in bubbles] == ["zbv, pp 4, vpp 2", "1f1b, pp 4", "zbv, pp 4"]
    assert 0 < rows[0].bubble_share < rows[1].bubble_share and rows[2].bubble_share is None


V3_CUT = """
--parallel.pp=2 --parallel.ep=2 --parallel.vpp=1 --parallel.pp_layout= --parallel.pp_schedule=1f1b --model.num_layers=8
--model.num_dense_layers=1 --model.moe.num_experts=32 --model.moe.num_groups=4 --model.moe.top_k_groups=2
--train.global_batch_sequences=32 --memory.recompute=none
""".split()


def test_train_benchmark_gives_the_peer_the_same_sizes(bench: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that overrides change; another width is refused, as torchtitan's shape has its own."""
    module, runs = bench
    recipe, options = str(RECIPES / "deepseek_v3.toml"), ["--nproc=4", "--peer", "--routings=natural", *V3_CUT]
    module.main([recipe, *options])
    sizes = ["--num-layers=8", "--num-dense-layers=1", "--num-experts=32", "--num-groups=4", "--top-k-groups=2"]
    assert set(sizes) <= set(runs[-1]) and {"--batch=16", "--microbatches=8"} <= set(runs[-1])
    monkeypatch.setattr(sys, "argv", ["", *runs[-1][1:], "--out=unused.json"])
    monkeypatch.setenv("WORLD_SIZE", "4")
    peer = tools("peer_torchtitan")
    given = peer.parse_args()
    args = peer.peer_spec(given).model_args["671B"]
    args.update_from_config(peer.peer_config(given))
    recipe = load_recipe(recipe, V3_CUT)
    assert (args.n_layers, args.n_dense_layers, args.dim, args.n_heads) == (8, 1, 7168, 128)
    assert (args.moe_args.num_experts, args.moe_args.num_expert_groups, args.moe_args.num_limited_groups) == (32, 4, 2)
    with torch.device("meta"):
        model = peer.get_train_spec("deepseek_v3").model_cls(args)
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(recipe.model).total
    for other in ("--model.hidden_size=1024", "--model.num_dense_layers=1"):
        rows = module.main([QWEN3, "--nproc=8", "--peer", "--routings=natural", other])
        assert "of torchtitan's qwen3_30b_a3b only num_layers, moe.num_experts may be" in rows[1].result["error"]


def test_train_benchmark_gives_the_peer_the_same_axes(bench: Any) -> None:
    """With tp or cp its ranks share sequences. With cp it gets options with which it runs, which others replace."""
    module, runs = bench
    options = ["--nproc=8", "--peer", "--routings=natural", "--train.global_batch_sequences=32"]
    module.main([QWEN3, *options, "--parallel.tp=2"])
    assert {"--batch=8", "--tp=2"} <= set(runs[-1]) and not {"--cp=2", "--recompute=none"} & set(runs[-1])
    module.main([QWEN3, *options, "--parallel.cp=2", "--peer-args", "--recompute=selective"])
    assert {"--batch=8", "--cp=2", "--attention=cudnn"} <= set(runs[-1])
    recompute = [word for word in runs[-1] if word.startswith("--recompute")]
    assert recompute == ["--recompute=none", "--recompute=selective"]


def test_train_benchmark_compares_pipelines_after_their_bubble(bench: Any, tools: Any) -> None:
    """The fake runs are all equally fast, so the ratio is 1 / (1 - bubble). Peers are no reference."""
    module, _ = bench
    rows = module.main([QWEN3, "--nproc=8", "--routings=natural", "--vary", PIPELINE, "--peer"])
    column = tools("result_table").COLUMNS.index("of pp 1 less bubble")
    found = [cells(line)[column] for line in [*tools("result_table").table(rows)][2:]]
    assert found == ["–", f"{1 / (1 - rows[1].bubble_share):.2f}", "–"] and 1.1 < float(found[1]) < 1.5
    alone = module.main([QWEN3, "--nproc=8", "--routings=natural", *PIPELINE.split(), "--peer"])
    assert cells([*tools("result_table").table(alone)][2])[column] == "–"


def test_train_benchmark_variants_of_pipelines_are_valid(bench: Any) -> None:
    module, _ = bench
    options = ["--nproc=4", f"--variants={TOOLS / 'pipelines.txt'}", "--routings=forced", "--model.num_layers=24"]
    sizes = ["--parallel.ep=2", "--train.global_batch_sequences=32", "--train.micro_batch_sequences=2"]
    first, *rows = module.main([QWEN3, *options, *sizes])
    assert first.bubble_share == 0 and len(rows) == 17
    assert {row.result.get("error") for row in rows} == {None}
    assert {row.facts["microbatches"] for row in rows} == {"8", "16"}


def test_time_steps_of_a_pipeline_are_those_of_one_process(ranks: Any) -> None:
    (one,), split = ranks(1, time_tiny), ranks(2, time_tiny, "--parallel.pp=2")
    for result in split:
        assert result["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert result["expert_load"] == pytest.approx(one["expert_load"])
        tokens_per_second = 32 * 64 / 2 / result["median_step_ms"] * 1e3
        assert result["tokens_per_second_per_gpu"] == pytest.approx(tokens_per_second)
    assert split[0]["peak_memory_gib"] == split[1]["peak_memory_gib"] > 0


def time_tiny(*overrides: str) -> dict[str, Any]:
    sys.path.insert(0, str(TOOLS))
    recipe = load_recipe(QUICKSTART, [*TINY, "--train.micro_batch_sequences=8", *overrides])
    return importlib.import_module("time_steps").measure(recipe, torch.device("cpu"), 1, Path())


def test_train_benchmark_does_not_start_invalid_recipes(bench: Any) -> None:
    module, runs = bench
    rows = module.main([MIXTRAL, "--nproc=8", "--train.forced_load=skewed", "--vary", "--model.no_such_key=1"])
    assert runs == [] and "would be the hottest rank" in rows[0].result["error"]
    assert "model.no_such_key is not a known key" in rows[1].result["error"]


def test_train_benchmark_launches_process_wide_settings_separately(bench: Any) -> None:
    module, runs = bench
    varied = ["--vary", "--run.is_deterministic=true", "--vary", "--memory.recompute=experts"]
    common = ("--train.forced_load=balanced", "--perf.attention=auto")
    rows = module.main([QWEN3, "--nproc=8", *common, *varied, "--profile=kernels"])
    assert [[json.loads(job)["number"] for job in command[4:]] for command in runs] == [[0, 2], [1]]
    assert all(command[3] == "--profile=kernels" for command in runs)
    assert [row.name.partition(", ")[2] for row in rows] == [
        "",
        "run.is_deterministic=true",
        "memory.recompute=experts",
    ]


def test_train_benchmark_profiles_only_gpus(
    bench: Any, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, runs = bench
    rows = module.main([QUICKSTART, "--profile=kernels", *TINY])
    assert runs == [] and 'run.device = "cpu"; omit it' in rows[0].result["error"]
    worker, out = tools("time_steps"), tmp_path / "lines"
    monkeypatch.setattr(worker, "reporting_errors", lambda *_: nullcontext())
    job = json.dumps({"recipe": QUICKSTART, "overrides": TINY})
    monkeypatch.setattr("sys.argv", ["time_steps.py", job, "--profile=kernels", f"--out={out}"])
    with pytest.raises(ValueError, match="on the CPU; omit it"):
        worker.main()


def test_time_steps_refuses_recipes_that_cannot_share_processes(tools: Any) -> None:
    recipes = [load_recipe(QUICKSTART, [*TINY, *extra]) for extra in ([], ["--run.is_deterministic=true"])]
    worker = tools("time_steps")
    assert worker.common_run(recipes[:1] * 2) == recipes[0].run
    with pytest.raises(RecipeError, match="use separate calls"):
        worker.common_run(recipes)


SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tools!r})
from rank_processes import reporting_errors, write_once
out = Path(sys.argv[-1].partition("=")[2])
with reporting_errors(out):
    if sys.argv[-2] == "hang":
        time.sleep(60)
    if sys.argv[-2] == "die":
        sys.exit(3)
    if sys.argv[-2] == "fail":
        raise MemoryError("no room\\nat all")
    write_once(out, {{"figure": 1}})
"""


def test_rank_processes_return_figures_or_errors(tools: Any, tmp_path: Path) -> None:
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


@pytest.mark.few()
def test_train_benchmark_candidates_in_one_launch_are_independent(
    tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module, processes = tools("bench_train"), tools("rank_processes")
    launches, popen = [], processes.subprocess.Popen

    def launch(command: list[str], **options: Any) -> Any:
        launches.append([json.loads(argument)["number"] for argument in command if argument.startswith("{")])
        return popen(command, **options)

    monkeypatch.setattr(processes.subprocess, "Popen", launch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    missing = f"--data.source=text --data.path={tmp_path}/none*"
    varied = ["--train.micro_batch_sequences=8", "--run.seed=0", missing]
    options = ["--nproc=2", "--steps=3", "--warmup=1", *(part for value in varied for part in ("--vary", value))]
    rows = module.main([QUICKSTART, *options, *TINY, "--parallel.ep=2", "--parallel.dispatcher=alltoall"])
    assert launches == [[0, 1, 2, 3]], "one launch; test_bench_dispatch.py has failures before the last"
    assert ["error" in row.result for row in rows] == [False, False, False, True]
    assert f"{tmp_path}/none*" in rows[3].result["error"]
    losses = [row.result.get("losses") for row in rows]
    assert losses[0] == losses[2] and losses[1] == pytest.approx(losses[0], rel=1e-4), (
        "the second run has another microbatch size, so tokens are forced to other experts"
    )
    rows = [line.split(" | ")[0] for line in capfd.readouterr().out.splitlines() if line.startswith("| quickstart")]
    assert len(rows) == 8 and rows[:4] == rows[4:], "each row when it is available, and all rows at the end"


def test_cleanup_destroys_groups(ranks) -> None:
    assert ranks(4, destroy_groups_and_repeat) == [(True, 1, True)] * 4


def destroy_groups_and_repeat() -> tuple[bool, int, bool]:
    """Whether meshes create groups, how many remain after the cleanup, and whether a repetition works."""
    sys.path.insert(0, str(TOOLS))
    cleanup, cpu = importlib.import_module("cleanup"), torch.device("cpu")
    groups = dist.distributed_c10d._world.pg_map

    def total() -> float:
        meshes = build_meshes(resolve(load_recipe(QUICKSTART, ["--parallel.ep=2"]).parallel, 4), cpu)
        shards = distribute_tensor(torch.arange(8.0), meshes.expert["ep"], [Shard(0)])
        return (shards * 2).sum().full_tensor().item()

    before, has_groups = total(), len(groups) > 1
    cleanup.free_memory(cpu)
    cleanup.destroy_subgroups()
    return has_groups, len(groups), total() == before == 56.0


def test_kernel_times_report(tools: Any, tmp_path: Path) -> None:
    kernels, trace = tools("kernel_times"), tmp_path / "trace.json"
    spans = [("gemm", 100, 40), ("gemm", 120, 40), ("Memcpy", 150, 5), ("nccl", 200, 100), ("x" * 500, 290, 1)]
    events = [{"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in reversed(spans)]
    events += [{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 900}, {"ph": "i"}]
    trace.write_text(json.dumps({"traceEvents": events}))
    span, busy, _, _, *lines = kernels.describe(kernels.read_events(trace))
    assert span.startswith("the step took 0.200 ms") and busy.endswith("0.160 ms of it (80.0%)")
    assert [line.split()[:5] for line in lines[:3]] == [
        ["0.100", "50.0%", "1", "100.0", "nccl"],
        ["0.080", "40.0%", "2", "40.0", "gemm"],
        ["0.005", "2.5%", "1", "5.0", "Memcpy"],
    ]
    assert len(lines) == 4 and lines[3].endswith(" " + "x" * kernels.NAME_WIDTH)
    assert list(kernels.describe([])) == ["the profiler recorded no work on the device"]
    many = [kernels.DeviceEvent(str(number), number, number + 1) for number in range(60)]
    assert len(list(kernels.describe(many))) == 4 + kernels.NUM_KERNELS


@pytest.mark.gpu
def test_train_benchmark_profiles_a_step_on_a_gpu(tools: Any, tmp_path: Path) -> None:
    """Three candidates in one launch: the profiler and CUDA graphs do not affect the next candidate."""
    folder = tmp_path / "kernels"
    on_gpu = [*TINY, "--run.device=cuda", "--precision.compute=bf16"]
    graph = "--compile.cudagraph=step --parallel.dispatcher=local"
    rows = tools("bench_train").main([QUICKSTART, *on_gpu, "--vary", graph, "--vary", graph, "--profile", str(folder)])
    assert [row.result.get("error") for row in rows] == [None] * 3
    texts = [file.read_text() for file in sorted(folder.iterdir())]
    assert len(texts) == 3 and all("the step took" in text and " kernel" in text for text in texts)


def test_time_steps_of_a_tiny_run(tools: Any, tmp_path: Path) -> None:
    worker = tools("time_steps")
    recipe = load_recipe(RECIPES / "quickstart.toml", TINY)
    with process_group(recipe.run) as device:
        result = worker.measure(recipe, device, 2, tmp_path)
        file = tmp_path / "text.txt"
        file.write_text("the same line again and again, from the first to the last.\n" * 600)
        text = replace(recipe.data, source="text", path=str(file))
        recipe = replace(recipe, data=text, train=replace(recipe.train, forced_load="none"))
        natural_result = worker.measure(recipe, device, 2, tmp_path)
    assert len(result["step_ms"]) == len(result["losses"]) == 4 and result["is_finite"]
    assert result["tokens_per_second_per_gpu"] == pytest.approx(32 * 64 / result["median_step_ms"] * 1e3)
    assert result["num_reruns"] == result["num_warmup_reruns"] == result["num_skipped"] == 0
    assert result["peak_memory_gib"] > 0
    assert result["expert_load"] == pytest.approx({"mean": 1.8, "worst": 1.8}, rel=1e-2), (
        "every microbatch has this load"
    )
    assert result["rank_load"] == {"mean": 1.0, "worst": 1.0}, "all experts are on one rank"
    assert all(loss == pytest.approx(math.log(256), rel=0.1) for loss in result["losses"]), "random tokens"
    assert natural_result["losses"][-1] < natural_result["losses"][0]
    assert natural_result["expert_load"]["worst"] > natural_result["expert_load"]["mean"] > 1


def draw_steps(*overrides: str) -> tuple[Any, list[Batch], list[Batch]]:
    """This rank's part of each sequence, its batches, and those of a process alone."""
    sys.path.insert(0, str(TOOLS))
    worker, cpu = importlib.import_module("time_steps"), torch.device("cpu")
    alone, recipe = (load_recipe(QUICKSTART, [*TINY, *words]) for words in ((), overrides))
    meshes = build_meshes(resolve(recipe.parallel, dist.get_world_size()), cpu)
    one_rank: Any = SimpleNamespace(data_rank=0, context_rank=0, sizes=SimpleNamespace(dp=1))
    shard = sequence_shard(recipe.parallel, meshes.context_rank)
    return shard, [*worker.draw_batches(recipe, meshes)], [*worker.draw_batches(alone, one_rank)]


@pytest.mark.parametrize("axis", ["pp", "tp", "cp"])
def test_time_steps_draws_the_same_tokens_for_ranks_that_share_sequences(ranks: Any, axis: str) -> None:
    for shard, mine, whole in ranks(2, draw_steps, f"--parallel.{axis}=2", "--train.micro_batch_sequences=8"):
        assert shard.num_ranks == (2 if axis == "cp" else 1)
        for batch, of_all in zip(mine, whole, strict=True):
            assert torch.equal(batch.tokens_MBN.flatten(0, 1), of_all.shard(shard).tokens_MBN.flatten(0, 1))


def test_time_steps_draws_new_tokens_for_each_step_and_data_rank(ranks: Any) -> None:
    (_, one, _), (_, other, _) = ranks(2, draw_steps)
    batches = [*one, *other]
    assert len({tuple(batch.tokens_MBN.flatten().tolist()) for batch in batches}) == 2 * 4
    for batch in batches:
        tokens_MBN = batch.tokens_MBN
        assert torch.equal(tokens_MBN[..., 1:], batch.labels_MBN[..., :-1])
        assert tokens_MBN.max() > 250 and tokens_MBN.float().mean() == pytest.approx(127.5, rel=0.1), "uniform"


def test_time_steps_start_from_the_weights_of_a_checkpoint(tools: Any, tmp_path: Path) -> None:
    worker, run, corpus = tools("time_steps"), tmp_path / "run", f"--data.path={RECIPES / '*.toml'}"
    text = [*TINY, "--data.source=text", corpus, "--train.forced_load=none"]
    train(load_recipe(QUICKSTART, [*text, f"--run.folder={run}", "--train.steps=20", "--optim.lr=1e-2"]))
    first_losses = []
    for weights in ("", run / "checkpoints" / "step-20"):
        recipe = load_recipe(QUICKSTART, [*text, f"--checkpoint.load_from={weights}"])
        with process_group(recipe.run) as device:
            first_losses.append(worker.measure(recipe, device, 2, tmp_path)["losses"][0])
    assert first_losses[1] < first_losses[0] - 1
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-20"]
