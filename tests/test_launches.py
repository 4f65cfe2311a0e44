"""All tests that launch runs and wait for them, beside the others."""

from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_launches_pass(launches: Any) -> None:
    """All tests that are marked so pass; a run of their files alone has them in its own process."""
    for beside in launches:
        beside.assert_all_ran()
