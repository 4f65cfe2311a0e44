"""Fixture of the profile tests: hand-written trace events."""

from types import ModuleType

import pytest
from support import trace_events as events


@pytest.fixture(scope="session")
def trace_events() -> ModuleType:
    """The functions that write trace events."""
    return events
