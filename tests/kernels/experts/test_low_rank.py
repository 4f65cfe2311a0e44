"""Products of slots with low-rank factors, and gradients of factors, held against loops in fp64."""

import pytest
import torch
from support.kernel_samples import sample_plans
from torch import Tensor

from titan_moe.kernels.experts.low_rank import low_products, low_weight_grads
from titan_moe.kernels.experts.tiles import plan_tiles

PLANS = {plan[0]: plan[1:] for plan in sample_plans(torch.device("cpu"))}
WIDTH, SCALE = 36, 1.5


@pytest.mark.interpreted
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_and_plans(plan: str, gathers: bool, is_transposed: bool) -> None:
    """With one rank below a block of the matrix units, and one of several; past the last slot there is NaN."""
    rows_R, slots_SK, offsets_e, num_experts = PLANS[plan]
    torch.manual_seed(0)
    for rank, num_parts in ((3, 2), (70, 1)):
        x = torch.randn(len(slots_SK) if gathers else len(rows_R), num_parts * WIDTH)
        factor = torch.randn(num_experts, num_parts, rank, WIDTH).mT
        factor = factor if is_transposed else factor.contiguous()
        low = torch.randn(len(rows_R), num_parts * rank)
        end = int(offsets_e[-1]) if len(offsets_e) else 0
        low[end:] = torch.nan
        if not gathers:
            x[end:] = torch.nan
        of_rows = {"rows_R": rows_R} if gathers else {}
        products = low_products(x, factor, plan_tiles(offsets_e, len(rows_R), 32), SCALE, **of_rows)
        grads = low_weight_grads(low, x, factor, offsets_e, **of_rows)
        assert grads.shape == factor.shape and grads.stride() == factor.stride()
        right, right_grads = exact(x[rows_R.long()] if gathers else x, factor, low, offsets_e)
        torch.testing.assert_close(products[:end].double(), right[:end], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grads.double(), right_grads, rtol=1e-5, atol=1e-5)


def exact(x: Tensor, factor: Tensor, low: Tensor, offsets_e: Tensor) -> tuple[Tensor, Tensor]:
    num_parts, width, rank = factor.shape[1:]
    x, factor, low = x.double().unflatten(1, (num_parts, width)), factor.double(), low.double()
    low = low.unflatten(1, (num_parts, rank))
    products, grads, begin = torch.zeros_like(low), torch.zeros_like(factor), 0
    for expert, end in enumerate(offsets_e.tolist()):
        products[begin:end] = SCALE * torch.einsum("spi,pir->spr", x[begin:end], factor[expert])
        grads[expert] = torch.einsum("spi,spr->pir", x[begin:end], low[begin:end])
        begin = end
    return products.flatten(1), grads
