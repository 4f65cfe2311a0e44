"""Fixture of the profile tests: hand-written trace events."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def trace_events() -> ModuleType:
    """The module trace_events.py, loaded by its path because tests are imported without packages."""
    spec = importlib.util.spec_from_file_location("trace_events", Path(__file__).with_name("trace_events.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
