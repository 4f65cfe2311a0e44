"""Parsing of traces that the test records with the profiler."""

import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

from titan_moe.profile.attribution import OTHER
from titan_moe.profile.breakdown import break_down
from titan_moe.profile.region import in_region
from titan_moe.profile.trace_parsing import Timeline, read_events, read_trace


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    torch._dynamo.reset()
    x = torch.randn(512, 512, requires_grad=True)
    compiled = torch.compile(lambda x: x.sin() @ x, fullgraph=True, backend="aot_eager")
    layers = [
        in_region(lambda x: x @ x, "attention"),
        in_region(compiled, "router"),
        lambda x: checkpoint(in_region(lambda x: (x @ x).relu(), "experts"), x, use_reentrant=False),
    ]
    with profile(
        activities=[ProfilerActivity.CPU],
        profile_memory=True,
        schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda finished: finished.export_chrome_trace(str(path)),
    ) as run:
        for _ in range(3):
            y = x
            for layer in layers:
                y = layer(y / 100)
            y.sum().backward()
            run.step()
    return read_trace(path)


def test_trace_attributes_forward_and_backward(timeline: Timeline) -> None:
    assert timeline.num_steps == 2 and not timeline.is_gpu
    found = Counter((span.part, span.is_backward) for span in timeline.spans if span.name == "aten::mm")
    assert found.keys() == {(part, phase) for part in ("attention", "router", "experts") for phase in (False, True)}
    result = break_down(timeline)
    for part in ("attention", "router"):
        assert found[part, True] > found[part, False], "each factor has a gradient"
        assert result.parts[part].backward_ms > 0 and result.parts[part].forward_ms > 0
    outside = {span.name for span in timeline.spans if span.part == OTHER}
    assert outside >= {"aten::div", "aten::sum"}, "operations between the regions"
    assert not outside & {"aten::mm", "aten::sin", "aten::cos", "aten::relu"}


def test_trace_memory_rises_and_falls(timeline: Timeline) -> None:
    sizes = [size for _, size in timeline.memory]
    assert max(sizes) >= 3 * 512 * 512 * 4 and sizes[-1] < max(sizes)


def test_trace_has_the_offset_to_unix_time(timeline: Timeline) -> None:
    assert timeline.unix_offset_us is not None
    assert abs((timeline.start_us + timeline.unix_offset_us) / 1e6 - time.time()) < 600


def test_trace_without_steps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match=r"empty.json: no optimizer step in this trace"):
        read_trace(path)
    with pytest.raises(ValueError, match="no optimizer step"):
        read_events([])


def test_trace_memory_is_that_of_the_gpu_if_there_is_one() -> None:
    def allocation(time_us: float, device_type: int, total: int) -> dict:
        args = {"Device Type": device_type, "Device Id": 0, "Total Allocated": total, "Bytes": 1}
        return {"ph": "i", "name": "[memory]", "ts": time_us, "args": args}

    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 9}
    host = [allocation(time_us, 0, 7) for time_us in range(3)]
    assert read_events([step, *host, allocation(2, 1, 20), allocation(1, 1, 10)]).memory == [(1, 10), (2, 20)]
    assert read_events([step, *host]).memory == [(0, 7), (1, 7), (2, 7)]
