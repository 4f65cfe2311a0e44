"""Named ranges of a step, by which a trace is broken down.

Without a profiler a range costs two host reads. In compiled code it costs nothing: it is removed before the graph is
built, and the kernels of the graph belong to the range around it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch.profiler import record_function

from titan_moe.plan.pipeline.action import Action, Pair, actions_in

PREFIX = "titan_moe/"
"""Prefix of these ranges in a trace."""
ACTION_PREFIX = "pipeline: "
"""Prefix of the ranges of pipeline actions. They are no parts of the model."""
ACTIONS_OF_A_PAIR = " + "
"""Between the names of the two in that of their range."""
MESSAGES = "pipeline"
"""The part of messages between the stages of a pipeline, and of the wait for one."""


def region(name: str) -> AbstractContextManager[Any]:
    """Attribute the enclosed work to the part `name`. The innermost region counts; backward has its forward's part."""
    if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():
        return nullcontext()
    return record_function(PREFIX + name)


def in_region(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a function in a region."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with region(name):
            return function(*args, **kwargs)

    return wrapper


def action_region(action: Action | Pair) -> AbstractContextManager[Any]:
    """Mark an action of a pipeline rank, or a pair, for its lane in the report. Parts inside keep their names."""
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    return record_function(
        ACTION_PREFIX + ACTIONS_OF_A_PAIR.join(" ".join(map(str, one)) for one in actions_in(action))
    )
