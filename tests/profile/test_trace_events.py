"""Events are read one by one: as json reads the file, in memory that does not grow with it."""

import json
import tracemalloc
from pathlib import Path
from types import ModuleType

import pytest

from titan_moe.profile import trace_events as reading
from titan_moe.profile.trace_events import TraceFile
from titan_moe.profile.trace_parsing import read_events, read_trace


def write(path: Path, events: list[dict], **fields: object) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, **fields, "traceEvents": events, "traceName": path.name}, indent=1))
    return path


@pytest.mark.parametrize("size", [1, 7, 64, 2**22])
def test_events_are_those_of_json(
    trace_events: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(reading, "CHUNK_CHARACTERS", size)
    events = [*trace_events.STEP_ON_GPU, {"ph": "X", "name": 'a "]} \\', "args": {"list": [1, [2]], "é": None}}]
    file = TraceFile(write(tmp_path / "trace.json", events, baseTimeNanoseconds=1_700_000_000_123))
    assert list(file) == events and file.base_us == 1_700_000_000.123
    assert read_trace(file.path) == read_events(trace_events.STEP_ON_GPU, 1_700_000_000.123)


def test_the_time_may_come_after_the_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"ph": "M"}\n], "baseTimeNanoseconds": 5000}')
    file = TraceFile(path)
    assert list(file) == [{"ph": "M"}] and file.base_us == 5.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no traceEvents"),
        ('{"steps": []}', "no traceEvents"),
        ('{"traceEvents": [{"ph": "X"}, {"ph": "X", "na', "not written to its end"),
        ('{"traceEvents": [{"ph": "X"},', "not written to its end"),
    ],
)
def test_a_file_that_is_no_whole_trace_is_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "cut.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"cut\.json: .*{reason}"):
        read_trace(path)


def test_memory_is_bounded_by_what_is_read(
    trace_events: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file most of which are arrows and arguments; nine times its size was needed."""
    monkeypatch.setattr(reading, "CHUNK_CHARACTERS", 2**16)
    e = trace_events
    events = [e.event("user_annotation", "ProfilerStep#1", 0, 1e6)]
    for number in range(1500):
        start_us = 10.0 * number
        events.append(e.event("cpu_op", f"aten::op_{number % 50}", start_us, start_us + 8, Shapes=[[64, 64]] * 20))
        events += [{"ph": "s", "cat": "ac2g", "name": "ac2g", "id": number, "pid": 1, "tid": 1, "ts": start_us}] * 5
    path = write(tmp_path / "trace.json", events)
    size = path.stat().st_size
    del events
    tracemalloc.start()
    timeline = read_trace(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(timeline.spans) == 1500 and peak < size
