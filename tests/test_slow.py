"""All slow tests of one process, beside the others."""

from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_slow_ones_pass(slow_ones: Any) -> None:
    """All tests that are marked so pass; a run of their files alone has them in its own process."""
    for beside in slow_ones:
        beside.assert_all_ran()
