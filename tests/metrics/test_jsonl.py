"""The file of records: crashes, resumes, and numbers that JSON lacks."""

import json

from titan_moe.metrics.jsonl import JsonLines


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_jsonl_lines_are_complete_after_each_write(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        lines.write({"step": step, "loss": 0.1 + 0.2})
        assert steps(lines.path)[-1] == step
    assert json.loads(lines.path.read_text().splitlines()[0])["loss"] == 0.1 + 0.2


def test_jsonl_resume_removes_later_records(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.drop_after(3)  # there is no file yet
    for step in (1, 2, 2, 3, 4):
        lines.write({"step": step})
    with lines.path.open("a") as file:
        file.write('{"step": 1, "lo')  # a crash in the middle of a line
    lines.drop_after(2)
    lines.write({"step": 3})
    assert steps(lines.path) == [1, 2, 2, 3]
    lines.drop_after(0)
    assert lines.path.read_text() == ""
    dropped = (tmp_path / "metrics.dropped.jsonl").read_text().splitlines()
    assert dropped[:3] == ['{"step": 3}', '{"step": 4}', '{"step": 1, "lo'] and len(dropped) == 7, "none is lost"


def test_jsonl_writes_nan_as_null(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write({"step": 1, "loss": float("nan"), "expert_load": {"a": float("inf"), "b": 1.0}})
    assert json.loads(lines.path.read_text(), parse_constant=None) == {
        "step": 1,
        "loss": None,
        "expert_load": {"a": None, "b": 1.0},
    }
    assert "NaN" not in lines.path.read_text() and "Infinity" not in lines.path.read_text()
