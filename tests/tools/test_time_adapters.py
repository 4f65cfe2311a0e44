"""The parts of adapters that are timed: ours and PyTorch's are equal, and failures are reported."""

import importlib
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported from its folder, for few and narrow experts in fp32."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    module = importlib.import_module("time_adapters")
    sizes = {"ROWS": 50, "CHOICES": 2, "SLOTS": 100, "EXPERTS": 3, "WIDTH": 68, "HIDDEN": 20, "RANK": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(module, "half", lambda device, *sizes: torch.randn(sizes, device=device))
    return module


NAMES = ["gate_up_A", "down_A", "down_B", "gate_up_B", "up", "down"]


@pytest.mark.interpreted
@pytest.mark.parametrize("name", [*NAMES, *(f"d_{name}" for name in NAMES), "swiglu"])
def test_parts_are_those_of_torch(tool: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for cuts in ("PRODUCT_CUTS", "GRADIENT_CUTS", "SWIGLU_CUTS"):
        monkeypatch.setattr(tool, cuts, getattr(tool, cuts)[:1])
    part = tool.parts(torch.device("cpu"))[name]()
    ours = part._replace(ours={key: make for key, make in part.ours.items() if "without" not in key})
    first, *others = tool.times(ours, time.monotonic() + 60, lambda call: 1.0)
    assert first.endswith("torch") and others
    for line in others:
        assert float(line.split("differs by ")[1].split(":")[0]) < 1e-5, line


def test_failures_and_the_deadline_are_told(tool: ModuleType) -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("out of shared memory\nmore")

    part = tool.Part("up", {"broken": fail}, lambda: torch.ones(4), 1e9)
    assert "failed: out of shared memory" in list(tool.times(part, time.monotonic() + 60, lambda call: 1.0))[1]
    assert "no time left" in next(tool.times(part, 0.0))
