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
