"""Ranks with another layout or schedule are named before the first group is made."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import load

from titan_moe.config.parallel import ParallelConfig
from titan_moe.training.build import assemble

pipelines = load("distributed/test_pipelines")
LOOP = replace(pipelines.SCHEDULES["interleaved_1f1b"], pp=2)


def say(parallel_of: dict[int, ParallelConfig], changes_of: dict[int, dict[str, Any]]) -> str:
    """What a rank says, if some have another recipe; nothing if it is assembled."""
    recipe = pipelines.recipe_of(LOOP)
    recipe = replace(recipe, parallel=parallel_of.get(dist.get_rank(), LOOP))
    try:
        assemble(
            replace(recipe, train=replace(recipe.train, **changes_of.get(dist.get_rank(), {}))), torch.device("cpu")
        )
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("parallel_of", "changes_of", "named"),
    [
        pytest.param({}, {}, "", id="one_recipe"),
        pytest.param(
            {
                1: replace(pipelines.SCHEDULES["zbv"], pp=2),
                3: replace(pipelines.SCHEDULES["1f1b"], pp=2),
            },
            {},
            "ranks 1, 3 is",
            id="schedules",
        ),
        pytest.param({2: ParallelConfig()}, {}, "ranks 2 is", id="without_a_pipeline"),
        pytest.param({3: replace(LOOP, pp=4)}, {}, "ranks 3 is", id="pp"),
        pytest.param({1: replace(LOOP, ep=2, dispatcher="alltoall")}, {}, "ranks 1 is", id="ep"),
        pytest.param({}, {1: {"global_batch_sequences": 32}}, "ranks 1 is", id="microbatches"),
    ],
)
def test_ranks_with_another_layout_or_schedule_are_named(
    ranks: Any, parallel_of: dict[int, ParallelConfig], changes_of: dict[int, dict[str, Any]], named: str
) -> None:
    for said in ranks(4, say, parallel_of, changes_of):
        assert said.startswith(f"the layout or the schedule of {named}" if named else "") and bool(said) == bool(named)
