"""The tables on paper: a row for each number of GPUs and for each published run."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from titan_moe.config.parallel import planning


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported from its folder."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module("on_paper")


def test_tables(tool: ModuleType) -> None:
    with planning():
        (*_, row), (*_, fp8) = list(tool.scaling("deepseek_v3", [8], "H100")), list(tool.published())
    assert row.startswith("| 8 | does not fit | does not fit | does not fit |")
    assert "| 1,024 | 368 |" in fp8
