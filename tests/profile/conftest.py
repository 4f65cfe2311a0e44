"""Fixtures: the trace by hand."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def by_hand() -> ModuleType:
    """What makes events by hand; tests are imported without packages, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location("trace_events", Path(__file__).with_name("trace_events.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
