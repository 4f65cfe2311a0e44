"""`titan-moe trace`: a short run, its traces, and the page that splits the step."""

import re
from functools import partial

import pytest
import torch

from titan_moe import cli
from titan_moe.profile.attribution import OTHER
from titan_moe.profile.breakdown import split
from titan_moe.profile.trace_parsing import Timeline, read_trace

IN_A_STEP = {"embedding", "attention", "dense", "router", "dispatch", "experts", "block", "head", "clip", "optimizer"}


def trace(run, *words: str) -> int:
    return cli.main(["trace", *run.words[1:], *words])


def named_share(timeline: Timeline, is_backward: bool | None = None) -> float:
    """How many of the operations have a part: a busy machine changes their times, not their number."""
    begun = [span for span in timeline.spans if not span.continues and is_backward in (None, span.is_backward)]
    return sum(span.part != OTHER for span in begun) / len(begun)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_step_is_split_into_named_parts(tiny, recompute: str) -> None:
    run = tiny("--train.steps=1000", f"--memory.recompute={recompute}", "--checkpoint.every_steps=1")
    assert trace(run) == 0
    (path,) = (run.folder / "trace" / "traces").iterdir()
    timeline = read_trace(path)
    result = split(timeline)
    assert timeline.num_steps == 3
    assert result.parts.keys() >= IN_A_STEP
    assert named_share(timeline) > 0.9 and named_share(timeline, is_backward=True) > 0.98
    for part in ("attention", "dense", "router", "experts", "head"):
        assert result.parts[part].forward_ms > 0 and result.parts[part].backward_ms > 0
    whole_ms = sum(time.total_ms for time in result.parts.values()) + result.idle_ms
    assert whole_ms == pytest.approx(result.step_ms)
    page = (run.folder / "trace" / "report.html").read_text()
    assert all(title in page for title in ("attention and norms", "dispatch", "head and loss", "idle", "<svg"))
    assert not re.search(r"src=|href=|<script", page)


def test_the_runs_own_folder_is_left_alone(tiny) -> None:
    run = tiny()
    assert trace(run, "--profile.num_steps=1") == 0
    assert [path.name for path in run.folder.iterdir()] == ["trace"]
    left = {path.name for path in (run.folder / "trace").iterdir()}
    assert left == {"traces", "report.html", "recipe.toml", "metrics.jsonl", "environment.json"}
    assert trace(run, "--profile.num_steps=1") == 0, "and again"


def test_compiled_pieces_are_listed(tiny) -> None:
    torch._dynamo.reset()
    run = tiny("--compile.regional=on", "--model.num_layers=1", "--model.num_dense_layers=0")
    assert trace(run, "--profile.num_steps=1") == 0
    page = (run.folder / "trace" / "report.html").read_text()
    assert "0 graph breaks, 0 recompiles, 0 compilations during the traced steps" in page
    assert "front (layers/block.py" in page and "serve (layers/experts.py" in page


def test_blocks_that_compile_whole_are_one_part(
    tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    run = tiny("--compile.regional=on", "--compile.extent=block")
    with caplog.at_level("INFO", "titan_moe"):
        assert trace(run, "--profile.num_steps=2") == 0
    assert 'compile.extent = "pieces" splits them' in caplog.text
    timeline = read_trace(next((run.folder / "trace" / "traces").iterdir()))
    result = split(timeline)
    assert result.parts.keys() >= {"embedding", "block", "head", "clip", "optimizer"}
    assert not result.parts.keys() & {"attention", "router", "dispatch", "experts", "combine"}
    assert result.parts["block"].forward_ms > 0 and named_share(timeline, is_backward=True) > 0.98
    page = (run.folder / "trace" / "report.html").read_text()
    assert "0 graph breaks, 0 recompiles, 0 compilations during the traced steps" in page
    row = page.partition("<td>rest of the blocks</td>")[2].partition("</tr>")[0]
    assert "FLOP/s" in row, "the work of all that is inside"


def test_ranks_name_their_messages(tiny) -> None:
    run = tiny("--parallel.ep=2", "--parallel.dispatcher=alltoall")
    process = run.start("--nproc", "2", verb="trace")
    said = process.communicate(timeout=180)[1]
    assert process.returncode == 0, said
    paths = sorted((run.folder / "trace" / "traces").iterdir())
    assert len(paths) == 2
    for path in paths:
        result = split(read_trace(path))
        assert result.parts["dispatch"].messages_ms > 0 and result.parts["combine"].messages_ms > 0
        assert result.parts["sharding"].messages_ms > 0
    assert re.search(r"[kM]B/s", (run.folder / "trace" / "report.html").read_text())


def test_a_stopped_trace_is_not_resumed(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny()
    (run.folder / "trace" / "checkpoints" / "step-3").mkdir(parents=True)
    assert trace(run) == 2
    assert "the checkpoint of a trace that was stopped" in capsys.readouterr().err


@pytest.mark.gpu
def test_kernels_find_their_parts(tiny) -> None:
    torch._dynamo.reset()
    run = tiny("--run.device=cuda", "--precision.compute=bf16")
    assert trace(run) == 0
    timeline = read_trace(next((run.folder / "trace" / "traces").iterdir()))
    result = split(timeline)
    assert timeline.is_gpu and timeline.memory
    # there is a tenth as much around a model this small as in it
    assert result.named_share >= 0.85 and 0 < result.host_bound_ms <= result.idle_ms
    for part in ("attention", "router", "experts"):
        assert result.parts[part].forward_ms > 0 and result.parts[part].backward_ms > 0
    launched = [span for span in timeline.spans if span.launched_us is not None]
    assert len(launched) > 0.99 * len(timeline.spans), "the trace ties every kernel to its launch"
