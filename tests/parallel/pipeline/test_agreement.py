"""Ranks with another schedule are named at the start."""

from typing import Any

import torch
import torch.distributed as dist

from titan_moe.parallel.pipeline.agreement import compare_schedules
from titan_moe.plan.pipeline.schedules import actions_of


def say(schedules: dict[int, str]) -> str:
    """What a rank says, if some have another schedule."""
    actions = actions_of(schedules.get(dist.get_rank(), "interleaved_1f1b"), 2, 2, 4)
    try:
        compare_schedules(actions, dist.group.WORLD, torch.device("cpu"))
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_with_another_schedule_are_named(ranks: Any) -> None:
    assert ranks(4, say, {}) == [""] * 4
    for said in ranks(4, say, {1: "zbv", 3: "interleaved_zero_bubble"}):
        assert said.startswith("the pipeline's schedule of ranks 1, 3 is not that of rank 0")
