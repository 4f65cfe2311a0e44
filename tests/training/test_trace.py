"""`titan-moe trace`: a short run, its traces and its report."""

import re
from functools import partial

import pytest
import torch

from titan_moe import cli
from titan_moe.checkpoint.folders import METADATA_FILE
from titan_moe.plan.pipeline.action import Action
from titan_moe.plan.pipeline.schedules import actions_of
from titan_moe.profile.attribution import OTHER
from titan_moe.profile.breakdown import break_down
from titan_moe.profile.lanes import read_lanes
from titan_moe.profile.trace_parsing import Timeline, read_trace
from titan_moe.training import trainer

pytestmark = pytest.mark.slow

IN_A_STEP = {"embedding", "attention", "dense", "router", "dispatch", "experts", "block", "head", "clip", "optimizer"}


def trace(run, *words: str) -> int:
    return cli.main(["trace", *run.words[1:], *words])


def named_share(timeline: Timeline, is_backward: bool | None = None) -> float:
    """The share of operations that have a part. Their number, unlike their time, does not depend on machine load."""
    spans = [span for span in timeline.spans if not span.is_continuation and is_backward in (None, span.is_backward)]
    return sum(span.part != OTHER for span in spans) / len(spans)


@pytest.mark.few("block")
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_trace_breaks_a_step_down_into_named_parts(tiny, recompute: str) -> None:
    run = tiny("--train.steps=1000", f"--memory.recompute={recompute}", "--checkpoint.every_steps=1")
    assert trace(run) == 0
    (path,) = (run.folder / "trace" / "traces").iterdir()
    timeline = read_trace(path)
    result = break_down(timeline)
    assert timeline.num_steps == 3
    assert result.parts.keys() >= IN_A_STEP
    assert named_share(timeline) > 0.9 and named_share(timeline, is_backward=True) > 0.98
    for part in ("attention", "dense", "router", "experts", "head"):
        assert result.parts[part].forward_ms > 0 and result.parts[part].backward_ms > 0
    total_ms = sum(time.total_ms for time in result.parts.values()) + result.idle_ms
    assert total_ms == pytest.approx(result.step_ms)
    report = (run.folder / "trace" / "report.html").read_text()
    assert all(title in report for title in ("attention and norms", "dispatch", "head and loss", "idle", "<svg"))
    assert not re.search(r"src=|href=|<script", report)


def test_trace_names_the_option_for_the_weights_of_the_run(
    tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainer, "run", lambda recipe, tracer: None)
    run = tiny()
    for step in (3, 12):
        checkpoint = run.folder / "checkpoints" / f"step-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / METADATA_FILE).touch()
    option = f"--checkpoint.load_from={checkpoint}"
    with caplog.at_level("INFO", "titan_moe"):
        assert trace(run) == 0
        assert option in caplog.text
        caplog.clear()
        assert trace(run, option) == 0
        assert caplog.text == ""


def test_trace_leaves_the_run_folder_unchanged(tiny) -> None:
    run = tiny()
    assert trace(run, "--profile.num_steps=1") == 0
    assert [path.name for path in run.folder.iterdir()] == ["trace"]
    names = {"traces", "report.html", "recipe.toml", "metrics.jsonl", "environment.json"}
    for _ in range(2):  # a second trace takes the place of the first
        assert {path.name for path in (run.folder / "trace").iterdir()} == names
        assert trace(run, "--profile.num_steps=1") == 0


def test_trace_report_lists_compiled_functions(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    run = tiny("--compile.regional=on", "--model.num_layers=1", "--model.num_dense_layers=0")
    assert trace(run, "--profile.num_steps=1") == 0
    report = (run.folder / "trace" / "report.html").read_text()
    assert "0 graph breaks, 0 recompiles, 0 compilations during the traced steps" in report
    assert "front (layers/block.py" in report and "compute (layers/experts.py" in report


def test_trace_attributes_communication_of_ranks(ranks, tiny) -> None:
    run = tiny("--parallel.ep=2", "--parallel.dispatcher=alltoall")
    run.on(ranks, 2, verb="trace")
    paths = sorted((run.folder / "trace" / "traces").iterdir())
    assert len(paths) == 2
    for path in paths:
        result = break_down(read_trace(path))
        assert result.parts["dispatch"].communication_ms > 0 and result.parts["combine"].communication_ms > 0
        assert result.parts["sharding"].communication_ms > 0
    assert re.search(r"[kM]B/s", (run.folder / "trace" / "report.html").read_text())


def test_trace_refuses_to_resume_a_stopped_trace(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny()
    (run.folder / "trace" / "checkpoints" / "step-3").mkdir(parents=True)
    assert trace(run) == 2
    assert "the checkpoint of an interrupted trace" in capsys.readouterr().err


@pytest.mark.gpu
def test_trace_attributes_kernels(tiny) -> None:
    torch._dynamo.reset()
    run = tiny("--run.device=cuda", "--precision.compute=bf16")
    assert trace(run) == 0
    timeline = read_trace(next((run.folder / "trace" / "traces").iterdir()))
    result = break_down(timeline)
    assert timeline.is_gpu and timeline.memory
    # in a model this small, a sixth of the work is outside all parts
    assert result.named_share >= 0.8 and 0 < result.host_bound_ms <= result.idle_ms
    for part in ("attention", "router", "experts"):
        assert result.parts[part].forward_ms > 0 and result.parts[part].backward_ms > 0
    launched = [span for span in timeline.spans if span.launched_us is not None]
    assert len(launched) > 0.99 * len(timeline.spans), "almost every kernel has its launch in the trace"


def test_trace_of_a_pipeline_has_a_lane_for_each_rank(ranks, tiny) -> None:
    run = tiny("--parallel.pp=2", "--train.micro_batch_sequences=1", "--profile.num_steps=2")
    run.on(ranks, 2, verb="trace")
    folder = run.folder / "trace"
    timelines = [read_trace(path) for path in sorted((folder / "traces").iterdir())]
    lanes = read_lanes(timelines, clocks_agree=True)
    lists = actions_of("1f1b", 2, 1, 4)
    assert [[run.action for run in runs] for runs in lanes.runs] == [
        [action for action in of_rank if not action.is_message] for of_rank in lists
    ]
    ends = {run.action: run.end for runs in lanes.runs for run in runs}
    starts = {run.action: run.start for runs in lanes.runs for run in runs}
    for microbatch in range(4):
        assert starts[Action("forward", 1, microbatch)] >= ends[Action("forward", 0, microbatch)]
        assert starts[Action("backward", 0, microbatch)] >= ends[Action("backward", 1, microbatch)]
    for timeline in timelines:
        result = break_down(timeline)
        assert result.parts["attention"].backward_ms > 0 and result.parts["pipeline"].exposed_ms > 0
    assert 0 < lanes.bubble_share < 1
    assert "<h2>Pipeline</h2>" in (folder / "report.html").read_text() and (folder / "pipeline.svg").exists()
