"""The benchmark of lanes runs on data of any size."""

import importlib
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2] / "tools")
    bench_lanes = importlib.import_module("bench_lanes")


def test_ranks_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("titan_moe.data.lanes.cut.MIN_PART_BYTES", 1)
    words = ["--ranks=8", "--megabytes=0.05", "--sequences=16", "--tokens=16", "--seconds=0.01"]
    assert min(bench_lanes.main(words)) > (0, 0)
    assert "rank   5 of   8" in capsys.readouterr().out
