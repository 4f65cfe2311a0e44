"""The collectives of the dispatchers, on four ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.dispatch.collectives import all_gather, all_to_all, reduce_scatter


def rows_of(rank: int, num_ranks: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(num_ranks * 3, 64, generator=generator).bfloat16()


def sum_in_bf16() -> tuple[Tensor, Tensor]:
    """A reduce-scatter, and an all-gather's gradient, of bf16 rows."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x = rows_of(rank, num_ranks)
    own = torch.zeros(3, 64, dtype=torch.bfloat16, requires_grad=True)
    all_gather(own, dist.group.WORLD).backward(x)
    return reduce_scatter(x, dist.group.WORLD), own.grad


def test_reduce_scatter_of_bf16_rows_sums_in_fp32(ranks) -> None:
    exact = torch.stack([rows_of(rank, 8).double() for rank in range(8)]).sum(0)
    for rank, results in enumerate(ranks(8, sum_in_bf16)):
        expected = exact[rank * 3 : rank * 3 + 3].bfloat16()  # rounded once
        for result in results:
            assert (result != expected).float().mean() < 0.01, "a bf16 sum over eight ranks rounds seven times"


def send_uneven() -> tuple[Tensor, Tensor]:
    """Rank r sends p rows to each rank p; backward sends their gradients back."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sent, received = list(range(num_ranks)), [rank] * num_ranks
    x = torch.full((sum(sent), 2), float(rank), requires_grad=True)
    out = all_to_all(x, received, sent, dist.group.WORLD)
    out.backward(torch.full_like(out, float(rank)))
    return out.detach(), x.grad


def test_all_to_all_with_uneven_splits_and_its_gradient(ranks) -> None:
    for rank, (out, grad) in enumerate(ranks(4, send_uneven)):
        assert out[:, 0].tolist() == [float(source) for source in range(4) for _ in range(rank)]
        assert grad[:, 0].tolist() == [float(target) for target in range(4) for _ in range(target)]
