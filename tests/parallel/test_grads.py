"""The norm of all gradients: as exact as fp32 whatever their dtype, and the factor that clips by it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from titan_moe.parallel.grads import clip_factor, grad_norm


def clip(dtype: torch.dtype, max_norm: float) -> dict[str, Any]:
    """Clip the same gradients on every rank, one of them empty, as an uneven shard may be."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (1000, 0, 37, 513)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    exact = torch.cat([parameter.grad.double() for parameter in parameters]).norm()
    frozen = nn.Parameter(torch.zeros(3))
    norm = grad_norm([*parameters, frozen], dist.group.WORLD)
    factor = clip_factor(norm, max_norm)
    after = torch.cat([(parameter.grad * factor).to(dtype).double() for parameter in parameters]).norm()
    return {"norm": norm.item(), "exact": exact.item(), "after": after.item()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_gradient_counts_once_and_exactly(ranks, num_ranks: int, dtype: torch.dtype) -> None:
    for seen in ranks(num_ranks, clip, dtype, 1.0):
        assert seen["norm"] == pytest.approx(seen["exact"], rel=1e-6)
        assert seen["after"] == pytest.approx(1.0, rel=5e-3 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("max_norm", [0.0, 1e6])
def test_small_gradients_stay_as_they_are(ranks, max_norm: float) -> None:
    (seen,) = ranks(1, clip, torch.float32, max_norm)
    assert seen["after"] == seen["exact"]


def test_the_factor_is_a_number_whatever_the_norm_is() -> None:
    norms = torch.tensor([0.0, 0.5, 2.0, torch.inf, torch.nan])
    torch.testing.assert_close(clip_factor(norms, 1.0), torch.tensor([1.0, 1.0, 0.5, 1.0, 1.0]))
    assert torch.equal(clip_factor(norms, 0.0), torch.ones(5))
