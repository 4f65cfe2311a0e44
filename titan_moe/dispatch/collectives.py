"""The collectives that dispatchers use, as differentiable operations: each one's backward is another of them.

A dispatcher starts a message and waits for it, and its `Collectives` says what that means. On `SYNC`, below, a message has
arrived once it is started. On `ASYNC` of split_wire.py it travels until it is waited for, under whatever is computed in
between.

The operations here are `torch.library` operations because an in-place collective inside an `autograd.Function` gives
silently wrong gradients under torch.compile on torch 2.11, and the names of the functional collectives differ between
2.11 and 2.13.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

# torch 2.13 gives it a new name and warns of the old
all_gather_rows = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
    # a wire that sums would round to half precision after every rank: the same bytes travel unsummed
    parts = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(parts, x.contiguous(), group=_resolve_process_group(group))
    return sum_of_parts(parts, num_ranks)


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


def sum_of_parts(parts: Tensor, num_ranks: int) -> Tensor:
    """Sum what each rank sent for the same rows, in rank order and at least fp32: [P·T, ...] -> [T, ...]."""
    dtype = torch.promote_types(parts.dtype, torch.float32)
    # a copy even where the dtype is right: compiled torch 2.11 loses a gradient that ends in a cast to its own dtype
    return parts.unflatten(0, (num_ranks, -1)).sum(0, dtype=dtype).to(parts.dtype, copy=True)


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


class Collective(NamedTuple):
    """A collective in two halves, which take the same arguments after the tensor."""

    start: Callable[..., Any]
    """Hand the rows over: -> what travels. Nobody may read it before `wait`."""
    wait: Callable[..., Tensor]
    """What `start` returned -> the rows that have arrived."""


class Collectives(NamedTuple):
    """How messages travel."""

    all_to_all: Collective
    """(x, received, sent, group), as the function of that name."""
    all_gather: Collective
    """(x, group)"""
    reduce_scatter: Collective
    """(x, group)"""


def _has_arrived(x: Tensor, *_: Any) -> Tensor:
    return x


SYNC = Collectives(
    Collective(all_to_all, _has_arrived), Collective(all_gather, _has_arrived), Collective(reduce_scatter, _has_arrived)
)
"""A message has arrived once it is started: on a GPU, the stream that started it waits for it there and then."""
