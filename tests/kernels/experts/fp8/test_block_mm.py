"""GEMMs whose warps take roles have the bits of those whose warps all do the same."""

import pytest
import torch
from support import load
from torch import Tensor

from titan_moe.kernels.experts.fp8.block_mm import block_mm, has_roles
from titan_moe.kernels.experts.fp8.block_weight_grad import block_weight_grad
from titan_moe.kernels.experts.fp8.packed import BLOCK
from titan_moe.kernels.experts.fp8.passes import BLOCK_CUT
from titan_moe.kernels.experts.fp8.requantized import requantized_rows, requantized_slots
from titan_moe.kernels.experts.fp8.rows import quantize_rows, unpack
from titan_moe.kernels.experts.fp8.weight_grad import weight_grad
from titan_moe.kernels.experts.fp8.weights import quantize_one_way
from titan_moe.kernels.experts.gather_mm import gather_mm
from titan_moe.kernels.experts.slot_mm import slot_mm
from titan_moe.kernels.experts.tiles import plan_tiles

rowwise = load("kernels/experts/fp8/test_fp8_mlp")
BF16, GPU = torch.bfloat16, torch.device("cuda", 0)
WIDTHS = [(128, 128), (384, 256), (1408, 640)]
"""Of the input and the output: one block, an odd number of them, more than a tile of outputs."""


def test_other_devices_keep_the_kernels_of_any_gpu() -> None:
    assert not has_roles(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", rowwise.PLANS)
@pytest.mark.parametrize(("width", "out_width"), WIDTHS)
def test_products_are_those_of_the_other_kernels(name: str, width: int, out_width: int) -> None:
    if not has_roles(GPU):
        pytest.skip("needs Hopper")
    torch.manual_seed(0)
    slots = rowwise.draw(name, "cuda", BF16, width, BLOCK).slots
    rows_R, offsets_e = slots.rows_R, slots.offsets_e
    num_slots, num_rows, end = rows_R.numel(), len(slots.slots_SK), int(offsets_e[-1])
    tiles = plan_tiles(offsets_e, num_slots, BLOCK)

    def draw(*sizes: int) -> Tensor:
        magnitude = torch.randint(-8, 8, (*sizes[:-1], 1), device="cuda").float().exp2()
        return (torch.randn(*sizes, device="cuda") * magnitude).to(BF16)

    codes, scales = quantize_one_way(draw(offsets_e.numel(), out_width, width), BLOCK, transposed=False)
    rows, of_slots = quantize_rows(draw(num_rows, width), BLOCK), draw(num_slots, width)
    options = {"columns": BLOCK, "dtype": BF16}

    expected = gather_mm(rows, rows_R, codes.mT, tiles, BLOCK_CUT, scales=scales, **options)[:end]
    actual = block_mm(rows, codes, scales, tiles, BF16, rows_R=rows_R)[:end]
    assert torch.equal(actual, expected)

    shifted, base = torch.cat([rows[:5], rows]), torch.tensor([5, 0], device="cuda")
    assert torch.equal(block_mm(shifted, codes, scales, tiles, BF16, rows_R=rows_R, base=base)[:end], expected)

    x, row_scales = (tensor.contiguous() for tensor in unpack(quantize_rows(of_slots, BLOCK), BLOCK))
    expected = slot_mm(x, codes.mT, tiles, cut=BLOCK_CUT, scales=(row_scales, scales), **options)[:end]
    assert torch.equal(block_mm(x, codes, scales, tiles, BF16, row_scales_Ri=row_scales)[:end], expected)

    a, b = requantized_slots(x, row_scales, tiles), requantized_rows(rows, rows_R, tiles)
    expected = weight_grad(a[0], b[0], offsets_e, a[1], BLOCK, b_scales=b[1])
    assert torch.equal(block_weight_grad(a[0], b[0], offsets_e, a[1], b[1]), expected)
