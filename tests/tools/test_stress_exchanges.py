"""The stress of exchanges beside messages: a small case over gloo, what it must find, and a hang."""

import argparse
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.slow

TOOLS = str(Path(__file__).parents[2] / "tools")


def stress(fault: str = "", dispatcher: str = "alltoall", pp: int = 2) -> Any:
    """Twenty exchanges; with a fault, rank 1 gets wrong rows, the last time only, or sends a wrong message."""
    sys.path.insert(0, TOOLS)
    tool = importlib.import_module("stress_exchanges")
    options = {"dispatcher": dispatcher, "pp": pp, "exchanges": 20, "in_flight": 2, "every": 10, "patience": 60.0}
    forward, send = tool.Exchanges.forward, tool.Exchanges.send_messages

    def wrong_forward(self: Any, number: int) -> Any:
        sample, y_TD, inputs = forward(self, number)
        return sample, y_TD * (1.001 if number == 19 and dist.get_rank() == 1 else 1.0), inputs

    def late_message(self: Any, number: int) -> Any:
        return send(self, number + (number == 15 and dist.get_rank() == 1))

    faults = {
        "row": patch.object(tool.Exchanges, "forward", wrong_forward),
        "message": patch.object(tool.Exchanges, "send_messages", late_message),
    }
    with faults.get(fault, patch.object(tool, "NUM_SAMPLES", tool.NUM_SAMPLES)):
        try:
            return tool.stress(tool.SMOKE, torch.device("cpu"), argparse.Namespace(**options))
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_stress_of_right_exchanges(ranks: Any, dispatcher: str) -> None:
    for result in ranks(4, stress, "", dispatcher):
        assert result["worst_error"] < 1e-6 and result["wrong_messages"] == 0
        assert (result["exchanges"], result["num_ranks"], result["pp"]) == (20, 4, 2)


def test_stress_of_more_stages(ranks: Any) -> None:
    assert [result["wrong_messages"] for result in ranks(4, stress, "", "alltoall", 4)] == [0] * 4


def test_stress_finds_a_wrong_row(ranks: Any) -> None:
    for problem in ranks(4, stress, "row"):
        assert problem == "20 exchanges: error 1.0e-03, 0 wrong messages"


def test_stress_finds_a_wrong_message(ranks: Any) -> None:
    """What rank 1 sends too early: rank 3 is the next stage."""
    for problem in ranks(4, stress, "message"):
        assert problem.startswith("20 exchanges: error") and problem.endswith(" 1 wrong messages")


HUNG = """
import sys
sys.path.insert(0, {tools!r})
import stress_exchanges as tool
tool.Exchanges.forward = lambda self, number: __import__("time").sleep(60)
tool.main(["--smoke", "--pp=1", "--dispatcher=alltoall", "--patience=1", "--out={out}"])
"""


def test_stress_ends_a_hang_and_says_where(tmp_path: Path) -> None:
    script = HUNG.format(tools=TOOLS, out=tmp_path / "out.json")
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert process.returncode == 1 and "in stress" in process.stderr and "Timeout" in process.stderr
    assert not (tmp_path / "out.json").exists()
