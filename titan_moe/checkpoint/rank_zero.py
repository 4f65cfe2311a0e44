"""Run a function on rank 0 and broadcast its result. Files, locks and the host may differ between ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from titan_moe.config import RecipeError

Result = TypeVar("Result")


def run_on_rank_zero(function: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Call a function on the group's first rank and return its result on all ranks. Collective; the result is pickled.

    Raises: on every rank, the OSError, RecipeError or ValueError of rank 0. Otherwise the other ranks would hang, or
    fail with a broken connection before rank 0 has reported the reason.
    """
    result: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            result[0] = function()
        except (OSError, RecipeError, ValueError) as error:
            result[1] = error
    dist.broadcast_object_list(result, group=group, group_src=0, device=torch.device("cpu"))
    if result[1] is not None:
        raise result[1]
    return result[0]
