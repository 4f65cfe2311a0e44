"""All tests that use pools of ranks on CPUs, beside the others."""

from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_ranks_pass(pools: Any) -> None:
    """All tests of ranks pass; a run of their files alone has them in its own process."""
    for beside in pools:
        beside.assert_all_ran()
