"""The sizes of both views follow from the recipe and the number of ranks."""

import pytest

from titan_moe.config.parallel import ParallelConfig, ParallelSizes, resolve, smallest_world
from titan_moe.config.recipe import Recipe, num_microbatches
from titan_moe.config.train import TrainConfig


@pytest.mark.parametrize(
    ("parallel", "world_size", "expected"),
    [
        (ParallelConfig(), 1, ParallelSizes(1, 1, 1, 1, 1, 1, 1, 1, 1)),
        (ParallelConfig(ep=4), 8, ParallelSizes(8, 1, 1, 8, 1, 1, 2, 4, 1)),
        (ParallelConfig(dp_replicate=2, ep=2), 8, ParallelSizes(8, 1, 2, 4, 1, 1, 2, 2, 1)),
        (ParallelConfig(pp=2, tp=2, ep=4), 16, ParallelSizes(16, 2, 1, 4, 1, 2, 2, 4, 1)),
    ],
)
def test_resolve_covers_the_world_in_both_views(
    parallel: ParallelConfig, world_size: int, expected: ParallelSizes
) -> None:
    sizes = resolve(parallel, world_size)
    assert sizes == expected
    assert sizes.pp * sizes.dp * sizes.cp * sizes.tp == world_size
    assert sizes.pp * sizes.dp_replicate * sizes.edp * sizes.ep * sizes.etp == world_size


@pytest.mark.parametrize(
    ("parallel", "world_size"),
    [
        (ParallelConfig(dp_shard=3), 8),
        (ParallelConfig(dp_replicate=3), 8),
        (ParallelConfig(ep=3), 8),
        (ParallelConfig(pp=4), 2),
    ],
)
def test_resolve_refuses_axes_that_do_not_divide(parallel: ParallelConfig, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"the.* {world_size}"):
        resolve(parallel, world_size)


@pytest.mark.parametrize(
    ("parallel", "fewest"),
    [
        (ParallelConfig(), 1),
        (ParallelConfig(ep=8), 8),
        (ParallelConfig(dp_replicate=2, ep=4), 8),
        (ParallelConfig(dp_shard=16, ep=4), 16),
        (ParallelConfig(tp=2, ep=3), 6),
    ],
)
def test_smallest_world_fits_and_no_smaller_one_does(parallel: ParallelConfig, fewest: int) -> None:
    assert smallest_world(parallel) == fewest
    resolve(parallel, fewest)
    for fewer in range(1, fewest):
        with pytest.raises(ValueError):
            resolve(parallel, fewer)


@pytest.mark.parametrize(("world_size", "expected"), [(1, 12), (2, 6), (4, 3)])
def test_num_microbatches_fill_the_global_batch(world_size: int, expected: int) -> None:
    recipe = Recipe(train=TrainConfig(global_batch_sequences=24, micro_batch_sequences=2))
    assert num_microbatches(recipe, world_size) == expected
