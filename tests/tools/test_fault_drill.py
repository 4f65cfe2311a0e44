"""A short drill: kinds of faults once, on one rank or two; a drill finds what is lost."""

import importlib
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.launches]

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def drill(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported from its folder."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("fault_drill")


@pytest.mark.few("kill-1")
@pytest.mark.parametrize(("fault", "num_ranks"), [("kill", 1), ("rank-kill", 2), ("full-disk", 1)])
def test_fault_drill_loses_nothing(
    drill: ModuleType, fault: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs are shorter than those of a long drill, and so are the delays before their faults. Each start of two ranks
    takes 15 s of CPU time."""
    monkeypatch.setitem(drill.STEPS, num_ranks, 24)
    monkeypatch.setattr(drill, "LONGEST_DELAY_S", 1.0)
    monkeypatch.setattr(sys, "argv", ["fault_drill.py", f"--{fault}s", "1", "--ranks", str(num_ranks)])
    code, said = drill.main(), capsys.readouterr().out
    assert code == 0, said
    assert f"| {fault.replace('-', ' ')} | {num_ranks} | 1 |" in said and "1 faults, 0 problems" in said


def test_fault_drill_finds_other_losses(drill: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(drill.STEPS, 1, 8)
    alone = drill.Drill(tmp_path, 1, 0.5, random.Random(0))
    assert list(alone.expected) == list(range(1, 9))
    row = drill.Row("kill", 1)
    alone.expected = alone.expected | {5: 0.0}
    alone.compare(row, alone.straight)
    assert row.problems == ["1 losses differ from the undisturbed run, the first at step [5]"]
    assert row.cells().endswith("| 1 problems |")


def test_fault_drill_divides_faults(drill: ModuleType) -> None:
    assert [drill.share_of(100, [1, 2, 4], number) for number in (1, 2, 4)] == [34, 33, 33]
