"""A short drill: each kind of fault once, on two ranks; a drill finds what is lost."""

import importlib
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def drill(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported from its folder."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("fault_drill")


def test_fault_drill_loses_nothing() -> None:
    faults = ("--kills", "2", "--rank-kills", "1", "--full-disks", "1", "--launcher-kills", "1")
    command = [sys.executable, str(TOOLS / "fault_drill.py"), *faults, "--ranks", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| kill | 2 | 2 |" in ended.stdout and "5 faults, 0 problems" in ended.stdout


def test_fault_drill_finds_other_losses(drill: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(drill.STEPS, 1, 8)
    alone = drill.Drill(tmp_path, 1, 0.5, random.Random(0))
    assert list(alone.expected) == list(range(1, 9))
    row, run = drill.Row("kill", 1), alone.new_run()
    alone.expected = alone.expected | {5: 0.0}
    alone.finish(row, run)
    assert row.problems == ["1 losses differ from the undisturbed run, the first at step [5]"]
    assert row.cells().endswith("| 1 problems |")


def test_fault_drill_divides_faults(drill: ModuleType) -> None:
    assert [drill.share_of(100, [1, 2, 4], number) for number in (1, 2, 4)] == [34, 33, 33]
