"""Sequences that are split over ranks: collectives of sequence parallelism, and sums of balancing losses.

P ranks · B batch · N sequence · n tokens of a rank (N/P) · D width · E experts

A layer whose weights are split gathers the sequence before its first GEMM and reduce-scatters partial sums after its
last one. Together they move as many bytes as an all-reduce. Norms, routers and residuals between layers then run on n
tokens instead of N (arXiv:2205.05198). Gather and reduce-scatter are the backward of each other.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

from titan_moe.config.parallel import ParallelConfig
from titan_moe.dispatch.collectives import all_gather, reduce_scatter
from titan_moe.layers.balance import LoadBalance, Sums
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.mesh import Meshes


def apply(model: nn.Module, config: ParallelConfig, meshes: Meshes) -> None:
    """Sum the balancing losses of sequences over the ranks of cp and tp, which have parts of them, in place."""
    num_ranks = config.cp * config.tp
    if num_ranks == 1:
        return
    for module in model.modules():
        match module:
            case Transformer():
                module.length_multiple = config.length_multiple
                module.num_sequence_ranks = num_ranks
                module.tensor_rank = meshes.dense.get_local_rank("tp")
            case LoadBalance():
                module.num_sequence_ranks = num_ranks
                if module.coefs.are_used or module.z_loss_coef:
                    module.sum_over_tokens = SumOverRanks(meshes.sequence_group)


def gather_sequence(x_BnD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the tokens of all ranks, in the order of the sequence: [B, n, D] -> [B, N, D]."""
    x_PBnD = all_gather(x_BnD, group).unflatten(0, (group.size(), -1))
    return x_PBnD.transpose(0, 1).flatten(1, 2)


def scatter_sequence(x_BND: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks; each rank gets its part of the sequence: [B, N, D] -> [B, n, D]."""
    x_PBnD = x_BND.unflatten(1, (group.size(), -1)).transpose(0, 1)
    return reduce_scatter(x_PBnD.flatten(0, 1), group)


def gather_output(group: dist.ProcessGroup, _: nn.Module, __: Any, out_BnD: Tensor) -> Tensor:
    """`gather_sequence` as a forward hook of a layer, bound to a group."""
    return gather_sequence(out_BnD, group)


def by_rank(labels_BN: Tensor, num_ranks: int) -> Tensor:
    """Order tokens by rank, as `all_gather` does: [B, N] -> [P·B, n]."""
    return labels_BN.unflatten(1, (num_ranks, -1)).transpose(0, 1).flatten(0, 1)


@torch.library.custom_op("titan_moe::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """The sum over the ranks of a group, of which each keeps the gradient of its own summand."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_resolve_process_group(group))
    return total


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Backward needs nothing."""


sum_over_ranks.register_fake(lambda x, group: torch.empty_like(x, memory_format=torch.contiguous_format))
# every rank computes the same loss of the sum, and keeps the gradient of its own part
sum_over_ranks.register_autograd(lambda ctx, grad: (grad.clone(), None), setup_context=_save)


class SumOverRanks:
    """`LoadBalance.sum_over_tokens` where ranks have a part of each sequence: one message for all three sums."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group_name = group.group_name

    def __call__(self, share_sums_BE: Tensor, counts_BE: Tensor, z_sum: Tensor) -> Sums:
        own = [share_sums_BE.flatten(), counts_BE.flatten().to(share_sums_BE.dtype), z_sum[None]]
        total = sum_over_ranks(torch.cat(own), self.group_name)
        shares, counts, z = total.split([share_sums_BE.numel(), counts_BE.numel(), 1])
        return shares.view_as(share_sums_BE), counts.view_as(counts_BE), z[0]
