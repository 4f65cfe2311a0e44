"""The collectives that dispatchers use, as differentiable operations: each one's backward is another of them.

They are `torch.library` operations because an in-place collective inside an `autograd.Function` gives silently wrong
gradients under torch.compile on torch 2.11, and the names of the functional collectives differ between 2.11 and 2.13.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

# torch 2.13 gives these two new names and warns of the old
all_gather_rows = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_rows = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@torch.library.custom_op("titan_moe::all_to_all", mutates_args=())
def _all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=_resolve_process_group(group))
    return out


@_all_to_all.register_fake
def _(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    return x.new_empty(sum(received), *x.shape[1:])


def _save_splits(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.received, ctx.sent, ctx.group = inputs


_all_to_all.register_autograd(
    lambda ctx, grad: (_all_to_all(grad, ctx.sent, ctx.received, ctx.group), None, None, None),
    setup_context=_save_splits,
)


@torch.library.custom_op("titan_moe::all_gather", mutates_args=())
def _all_gather(x: Tensor, group: str, num_ranks: int) -> Tensor:
    out = x.new_empty(num_ranks * x.shape[0], *x.shape[1:])
    all_gather_rows(out, x.contiguous(), group=_resolve_process_group(group))
    return out


@_all_gather.register_fake
def _(x: Tensor, group: str, num_ranks: int) -> Tensor:
    return x.new_empty(num_ranks * x.shape[0], *x.shape[1:])


@torch.library.custom_op("titan_moe::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, group: str, num_ranks: int) -> Tensor:
    if x.dtype.itemsize >= 4:
        out = x.new_empty(x.shape[0] // num_ranks, *x.shape[1:])
        reduce_scatter_rows(out, x.contiguous(), group=_resolve_process_group(group))
        return out
    # a wire that sums would round to half precision after every rank: the same bytes travel unsummed
    parts = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(parts, x.contiguous(), group=_resolve_process_group(group))
    return parts.unflatten(0, (num_ranks, -1)).sum(0, dtype=torch.float32).to(x.dtype)


@_reduce_scatter.register_fake
def _(x: Tensor, group: str, num_ranks: int) -> Tensor:
    return x.new_empty(x.shape[0] // num_ranks, *x.shape[1:])


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.num_ranks = inputs


_all_gather.register_autograd(
    lambda ctx, grad: (_reduce_scatter(grad, ctx.group, ctx.num_ranks), None, None), setup_context=_save_group
)
_reduce_scatter.register_autograd(
    lambda ctx, grad: (_all_gather(grad, ctx.group, ctx.num_ranks), None, None), setup_context=_save_group
)


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send each rank p its `sent[p]` rows of x and get `received[p]` from it, all in rank order.

    Shapes: [sum(sent), ...] -> [sum(received), ...].
    """
    return _all_to_all(x, received, sent, group.group_name)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks in rank order: [T, ...] -> [P·T, ...]; T must be the same everywhere."""
    return _all_gather(x, group.group_name, group.size())


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks in at least fp32, each rank keeping its rows: [P·T, ...] -> [T, ...]."""
    return _reduce_scatter(x, group.group_name, group.size())
