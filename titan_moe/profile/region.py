"""Named ranges of a step: what a trace is split by.

A range costs two host reads when nobody profiles, and nothing at all inside a compiled piece: there it is gone before
the graph is made, and the kernels of the piece belong to the range around it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch.profiler import record_function

PREFIX = "titan_moe/"
"""What the names of our ranges begin with in a trace."""


def region(name: str) -> AbstractContextManager[Any]:
    """Name what happens inside, for the trace; the innermost name counts, and backward follows its forward."""
    if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():
        return nullcontext()
    return record_function(PREFIX + name)


def marked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Run a function inside a region."""

    @wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with region(name):
            return function(*args, **kwargs)

    return inside
