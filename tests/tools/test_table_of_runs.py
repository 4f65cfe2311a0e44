"""The table of runs, on records written here."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported from its folder."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module("table_of_runs")


def record(step: int, scale: float = 1.0, **others: Any) -> dict[str, Any]:
    speed = scale * (100 if step == 30 else 1000 + step)
    return {
        "step": step,
        "loss": 10.0 - step / 10,
        "tokens_per_second_per_gpu": speed,
        "tflops_per_gpu": speed / 10,
        "memory_gib": 10.0 + step,
        **others,
    }


def with_experts(step: int) -> dict[str, Any]:
    return record(
        step,
        scale=2.0,
        expert_load={"layers.0": 2.0, "layers.1": 9.0 if step == 5 else 1.5},
        overload={"avg": 1.0, "max": 1.25, "cum": 3.0},
        capacity={"factor": 1.125 if step < 30 else 1.25, "needed": step / 40},
        rerun_steps=(step > 3) + 2 * (step > 35),
        graph_recordings=1 + (step > 30),
    )


def write(folder: Path, records: list[dict[str, Any]]) -> str:
    folder.mkdir()
    lines = [*records, {"step": records[-1]["step"], "validation_loss": 1.0}] if records else []
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(folder)


def test_table_of_runs(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = write(tmp_path / "dense", [record(step) for step in range(1, 41)])
    moe = write(tmp_path / "moe", [with_experts(step) for step in range(1, 41)])
    lines = tool.main([dense, f"{moe}/metrics.jsonl", "--after=20"])
    assert capsys.readouterr().out.splitlines() == lines
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    of_dense, of_moe = (dict(zip(names, row, strict=True)) for row in rows)
    for row, name in ((of_dense, "dense"), (of_moe, "moe")):
        assert row["run"] == name and row["steps"] == "40" and row["steps below 90 %"] == "30"
        assert row["peak GiB"] == "50.0" and row["loss at step"] == "20: 8.000, 40: 6.000"
    columns = ("tokens/s/GPU", "of the first", "TF", "slowest 5 % below")
    assert [of_dense[name] for name in columns] == ["1,030", "1.000", "103", "1,021"], "of steps 21 to 40; 30 is slow"
    assert [of_moe[name] for name in columns] == ["2,060", "2.000", "206", "2,042"]
    assert of_moe["capacity factor"] == "1.125 (step 2), 1.25 (step 31)", "records have the factor of the next step"
    assert of_moe["largest need"] == "1.00"
    assert of_moe["taken again; late"] == "3; 2" and of_moe["recordings; late"] == "2; 1"
    assert of_moe["busiest expert; rank"] == "2.00; 1.25", "step 5 is early"
    assert of_dense["capacity factor"] == of_dense["taken again; late"] == tool.NOTHING


def test_table_of_a_resumed_run_that_diverged(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts begin anew at step 25, and what is not finite is null."""
    steps = [record(step, rerun_steps=2 if step < 25 else step // 30) for step in range(1, 41)]
    steps[-1] |= {"loss": None, "capacity": {"factor": 1.5, "needed": None}}
    monkeypatch.chdir(write(tmp_path / "run", steps))
    row = [cell.strip() for cell in tool.main(["."])[-1].strip("|").split("|")]
    assert row[0] == "run" and row[8:11] == ["1.5 (step 41)", "–", "3; 1"] and row[-1] == "20: 8.000, 40: –"


@pytest.mark.parametrize(
    ("num_steps", "reason"), [(0, "no training step has been logged"), (20, "its last is that of step 20")]
)
def test_runs_without_steps_are_refused(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_steps: int, reason: str
) -> None:
    run = write(tmp_path / "run", [record(step) for step in range(1, num_steps + 1)])
    with pytest.raises(SystemExit):
        tool.main([run])
    assert f"{run}: " in (stderr := capsys.readouterr().err) and reason in stderr


def test_a_folder_that_is_no_run_is_refused(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path)])
