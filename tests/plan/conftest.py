"""Tests do not read the tables in this user's cache folder."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder of the user's tables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "titan_moe" / "kernels"
