"""Work that is counted: a clock tells what else a machine does."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

CALLS_OF_A_SECOND = 4_000_000
"""Of Python functions, such as planners call them, on one core."""


def count_calls(function: Callable[[], Any]) -> int:
    """The calls of Python functions that a call of `function` makes."""
    num_calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return num_calls
