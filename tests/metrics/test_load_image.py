"""The image of loads: its cells, and a scale beside them."""

import numpy as np
import pytest
import torch

from titan_moe.metrics.load_image import BOTTOM, CELL_PIXELS, LEFT, PAPER, TOP, draw_loads


@pytest.mark.parametrize(("num_layers", "num_experts"), [(1, 2), (24, 64)])
def test_an_image_of_loads_has_cells_axes_and_a_scale(num_layers: int, num_experts: int) -> None:
    loads_LE = torch.linspace(0, 5, num_layers * num_experts).view(num_layers, num_experts)
    image_HW = draw_loads(loads_LE, [str(layer) for layer in range(num_layers)])
    height, width = num_layers * CELL_PIXELS, num_experts * CELL_PIXELS
    cells = image_HW[TOP : TOP + height, LEFT : LEFT + width]
    assert image_HW.dtype == np.uint8
    assert cells[::CELL_PIXELS, ::CELL_PIXELS].tolist() == (loads_LE.clamp(max=4) * 255 / 4).round().int().tolist()
    for margin in (image_HW[:TOP], image_HW[TOP + height :], image_HW[TOP:, :LEFT]):
        assert margin.min() < PAPER, "words"
    bar = image_HW[TOP:-BOTTOM, LEFT + width + 16]
    assert bar[0] == 255 and bar[-1] == 0 and (np.diff(bar.astype(int)) <= 0).all()
    assert image_HW[TOP:, -1].min() == PAPER, "the words of the scale fit"
