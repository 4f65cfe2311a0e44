"""What one rank finds out for all: files, locks and the host may look different to another."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from titan_moe.config import RecipeError

Answer = TypeVar("Answer")


def run_on_rank_zero(question: Callable[[], Answer], group: dist.ProcessGroup | None = None) -> Answer:
    """Let the group's first rank answer, and tell the others; each must come. The answer travels pickled.

    Raises: on every rank, the OSError or RecipeError that the main rank has met: the others would wait in vain, or die
    of a broken connection before it has told its reason.
    """
    answer: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            answer[0] = question()
        except (OSError, RecipeError) as error:
            answer[1] = error
    dist.broadcast_object_list(answer, group=group, group_src=0, device=torch.device("cpu"))
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
