"""The sweep of tile sizes: ranking, failures, and the shapes of its inputs."""

import importlib
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported from its folder."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module("sweep_expert_gemms")


def test_sweep_sorts_by_time_and_reports_failures_last(tool: ModuleType) -> None:
    def run(candidate: str) -> torch.Tensor:
        if candidate == "broken":
            raise RuntimeError("out of shared memory\nmore")
        return torch.full((4,), 2.0 if candidate == "wrong" else 1.0)

    times = iter([3.0, 1.0, 0.5])
    problem = tool.Problem("dW1", run, ["default", "wrong", "better", "broken"], lambda: torch.ones(4), 1e9)
    lines = tool.sweep(problem, time.monotonic() + 60, lambda call: (call(), next(times))[1])
    assert [line.split()[-1] for line in lines[:3]] == ["better", "default", "rows"]
    assert "1.000 ms" in lines[0] and "1 TFLOP/s" in lines[0]
    assert "wrong: differs by 1.0e+00" in lines[3] and lines[4].endswith("broken: out of shared memory")


def test_sweep_starts_nothing_after_the_deadline(tool: ModuleType) -> None:
    problem = tool.Problem("dW1", lambda candidate: torch.ones(4), ["default"], lambda: torch.ones(4), 1e9)
    assert "no time left" in tool.sweep(problem, 0.0, lambda call: 1.0)[-1]


def test_sweep_selects_tiles_and_the_default(tool: ModuleType) -> None:
    problem = next(tool.problems("qwen3_ep8", torch.device("meta"), ["weight_grad"]))
    default, *others = tool.select_tiles(problem, ["num_stages=4", "group=16,"]).candidates
    assert default == problem.candidates[0] and 0 < len(others) < len(problem.candidates) - 1
    assert all(candidate.num_stages == 4 or candidate.group == 16 for candidate in others)
    assert tool.select_tiles(problem, [""]).candidates == problem.candidates


@pytest.mark.parametrize("shape", ["qwen3_ep8", "deepseek_v3_ep8"])
def test_sweep_inputs_of_a_shape(tool: ModuleType, shape: str) -> None:
    sizes = tool.EXPERT_SHAPES[shape]
    num_slots, num_experts, width, hidden = (sizes[key] for key in ("slots", "experts", "width", "hidden"))
    problems = list(tool.problems(shape, torch.device("meta"), ["weight_grad"]))
    assert [problem.name for problem in problems] == ["dW1", "dW2"]
    assert problems[0].flops == 2 * problems[1].flops == 4.0 * num_slots * width * hidden
    assert problems[0].baseline().shape == (num_experts, 2 * hidden, width)
    assert problems[1].baseline().shape == (num_experts, width, hidden)
