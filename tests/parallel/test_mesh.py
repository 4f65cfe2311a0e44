"""Process groups follow the axes, also on layouts that rules refuse today: pipelines."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.parallel.mesh import build_meshes

CPU = torch.device("cpu")


def look(parallel: ParallelConfig) -> dict[str, Any]:
    """The ranks of every group, what a sum over the data group gives, and the slice of the data."""
    meshes = build_meshes(resolve(parallel, dist.get_world_size()), CPU)
    rank = torch.tensor(float(2 ** dist.get_rank()))
    dist.all_reduce(rank, group=meshes.data_group)
    return {
        "data": dist.get_process_group_ranks(meshes.data_group),
        "stage": dist.get_process_group_ranks(meshes.stage_group),
        "world": dist.get_process_group_ranks(meshes.world_group),
        "sum": int(rank),
        "data_rank": meshes.data_rank,
        "is_world": [group is dist.group.WORLD for group in (meshes.data_group, meshes.stage_group)],
    }


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "data_groups", "stage_groups", "data_ranks"),
    [
        pytest.param(1, ParallelConfig(), [[0]], [[0]], [0], id="alone"),
        pytest.param(2, ParallelConfig(tp=2), [[0], [1]], [[0, 1]], [0, 0], id="tp2"),
        pytest.param(4, ParallelConfig(dp_replicate=2), [[0, 1, 2, 3]], [[0, 1, 2, 3]], [0, 1, 2, 3], id="hsdp2x2"),
        pytest.param(4, ParallelConfig(cp=2), [[0, 1, 2, 3]], [[0, 1, 2, 3]], [0, 0, 1, 1], id="dp2-cp2"),
        pytest.param(4, ParallelConfig(tp=2), [[0, 2], [1, 3]], [[0, 1, 2, 3]], [0, 0, 1, 1], id="dp2-tp2"),
        pytest.param(4, ParallelConfig(pp=2), [[0, 1], [2, 3]], [[0, 1], [2, 3]], [0, 1, 0, 1], id="pp2-dp2"),
        pytest.param(
            8,
            ParallelConfig(cp=2, tp=2, ep=4),
            [[0, 2, 4, 6], [1, 3, 5, 7]],
            [list(range(8))],
            [0, 0, 0, 0, 1, 1, 1, 1],
            id="dp2-cp2-tp2-ep4",
        ),
        pytest.param(
            8,
            ParallelConfig(pp=2, dp_replicate=2),
            [[0, 1, 2, 3], [4, 5, 6, 7]],
            [[0, 1, 2, 3], [4, 5, 6, 7]],
            [0, 1, 2, 3, 0, 1, 2, 3],
            id="pp2-hsdp2x2",
        ),
    ],
)
def test_mesh_groups_are_those_of_the_axes(
    ranks: Any,
    num_ranks: int,
    parallel: ParallelConfig,
    data_groups: list[list[int]],
    stage_groups: list[list[int]],
    data_ranks: list[int],
) -> None:
    for rank, seen in enumerate(ranks(num_ranks, look, parallel)):
        assert [seen["data"]] == [group for group in data_groups if rank in group]
        assert [seen["stage"]] == [group for group in stage_groups if rank in group]
        assert seen["world"] == list(range(num_ranks))
        assert seen["sum"] == sum(2**other for other in seen["data"]), "messages go where the ranks say"
        assert seen["data_rank"] == data_ranks[rank]
        is_world = [len(group) == num_ranks for group in (seen["data"], seen["stage"])]
        assert seen["is_world"] == is_world, "no second communicator of all ranks"


def look_at_sequences(parallel: ParallelConfig) -> tuple[list[Any], list[int], int]:
    """The ranks that shard dense parameters, those that have parts of the same sequences, and which part is here."""
    meshes = build_meshes(resolve(parallel, dist.get_world_size()), CPU)
    return meshes.dense_fsdp.mesh.tolist(), dist.get_process_group_ranks(meshes.sequence_group), meshes.context_rank


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "shards", "sequences", "context_ranks"),
    [
        pytest.param(2, ParallelConfig(), [[0, 1]], [[0], [1]], [0, 0], id="dp2"),
        pytest.param(2, ParallelConfig(cp=2), [[0, 1]], [[0, 1]], [0, 1], id="cp2"),
        pytest.param(4, ParallelConfig(cp=2), [[0, 1, 2, 3]], [[0, 1], [2, 3]], [0, 1, 0, 1], id="dp2-cp2"),
        pytest.param(4, ParallelConfig(tp=2), [[0, 2], [1, 3]], [[0, 1], [2, 3]], [0, 0, 0, 0], id="dp2-tp2"),
        pytest.param(
            4, ParallelConfig(dp_replicate=2, cp=2), [[[0, 1], [2, 3]]], [[0, 1], [2, 3]], [0, 1, 0, 1], id="hsdp2-cp2"
        ),
        pytest.param(
            8,
            ParallelConfig(cp=2, tp=2, ep=4),
            [[0, 2, 4, 6], [1, 3, 5, 7]],
            [[0, 1, 2, 3], [4, 5, 6, 7]],
            [0, 0, 1, 1, 0, 0, 1, 1],
            id="dp2-cp2-tp2",
        ),
    ],
)
def test_mesh_shards_dense_parameters_over_the_ranks_of_sequences(
    ranks: Any,
    num_ranks: int,
    parallel: ParallelConfig,
    shards: list[Any],
    sequences: list[list[int]],
    context_ranks: list[int],
) -> None:
    for rank, (shard, sequence, context_rank) in enumerate(ranks(num_ranks, look_at_sequences, parallel)):
        assert shard in shards and rank in torch.tensor(shard)
        assert [sequence] == [group for group in sequences if rank in group]
        assert context_rank == context_ranks[rank]
