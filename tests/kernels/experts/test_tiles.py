"""The tile map against its definition."""

import pytest
import torch

from titan_moe.kernels.experts.tiles import plan_tiles, plan_tiles_reference

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
BORDERS = [[3, 3, 300, 301], [0, 0, 0, 0], [128, 256, 256, 257], [320], [0, 0, 0, 0, 320]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("turn", [(0, 1), (1, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("offsets", BORDERS, ids=str)
def test_the_tile_map_is_its_definition(offsets: list[int], turn: tuple[int, int], device: str) -> None:
    offsets_e = torch.tensor(offsets, dtype=torch.int32, device=device)
    actual, expected = plan_tiles(offsets_e, 320, 128, *turn), plan_tiles_reference(offsets_e, 320, 128, *turn)
    assert actual.experts_M.tolist() == expected.experts_M.tolist()
    is_tile = expected.experts_M >= 0
    assert actual.begins_M[is_tile].tolist() == expected.begins_M[is_tile].tolist()
    assert actual.ends_M[is_tile].tolist() == expected.ends_M[is_tile].tolist()
    assert actual.count.tolist() == expected.count.tolist() == [int(is_tile.sum())]


@pytest.mark.parametrize("device", DEVICES)
def test_thread_blocks_loop_where_a_usual_load_has_fewer_tiles_than_the_bound(device: str) -> None:
    offsets_e = torch.tensor([3, 300, 301], dtype=torch.int32, device=device)
    for usual_slots, usual in ((None, 6), (0, 3), (129, 5), (320, 6), (9999, 6)):
        for plan in (plan_tiles, plan_tiles_reference):
            tiles = plan(offsets_e, 320, 128, usual_slots=usual_slots)
            assert (tiles.usual, tiles.looped() is None) == (usual, usual == 6)
