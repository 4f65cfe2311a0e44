"""All tests that use pools of ranks on CPUs, beside the others."""

from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_ranks_pass(pools: Any) -> None:
    """All tests of ranks pass; a run of their files alone has them in its own process."""
    code, log = pools.finish()
    assert code == 0 and " PASSED" in log, log
