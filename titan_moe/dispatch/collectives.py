"""Synchronous collectives of the dispatchers, differentiable: the backward of each is another one of them.

P ranks of the group · T rows of one rank

A dispatcher starts a collective and waits for it, through a `Collectives`. Those of `SYNC`, below, are complete when
they are started. Those of `ASYNC` (async_collectives.py) run until they are waited for, beside what is computed in
between.

The ops here are `torch.library` custom ops because an in-place collective inside an `autograd.Function` gives silently
wrong gradients under torch.compile on torch 2.11, and the names of the functional collectives differ between 2.11 and
2.13.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from titan_moe.kernels.experts.formats import COMPUTE, FORMATS

# torch 2.13 renamed it, and warns of the old name
all_gather_rows = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@torch.library.custom_op("titan_moe::all_to_all", mutates_args=())
def _all_to_all(
    x: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    group: str,
    row_format: str = COMPUTE,
    gradient_format: str = COMPUTE,
) -> Tensor:
    packed = FORMATS[row_format].pack(x)
    out = packed.new_empty(sum(received), *packed.shape[1:])
    dist.all_to_all_single(out, packed.contiguous(), list(received), list(sent), group=_resolve_process_group(group))
    return FORMATS[row_format].unpack(out)


_all_to_all.register_fake(lambda x, received, *_: x.new_empty(sum(received), *x.shape[1:]))


def _save_splits(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.received, ctx.sent, ctx.group, ctx.row_format, ctx.gradient_format = inputs


def _send_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx = _all_to_all(grad, ctx.sent, ctx.received, ctx.group, ctx.gradient_format, ctx.row_format)
    return dx, None, None, None, None, None


_all_to_all.register_autograd(_send_gradient, setup_context=_save_splits)


@torch.library.custom_op("titan_moe::all_gather", mutates_args=())
def _all_gather(x: Tensor, group: str, num_ranks: int) -> Tensor:
    out = x.new_empty(num_ranks * x.shape[0], *x.shape[1:])
    all_gather_rows(out, x.contiguous(), group=_resolve_process_group(group))
    return out


_all_gather.register_fake(lambda x, _, num_ranks: x.new_empty(num_ranks * x.shape[0], *x.shape[1:]))


@torch.library.custom_op("titan_moe::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, group: str, num_ranks: int) -> Tensor:
    # NCCL's half-precision reduce-scatter rounds at every hop: all-to-all moves as many bytes, and we sum in fp32
    parts = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(parts, x.contiguous(), group=_resolve_process_group(group))
    return sum_of_parts(parts, num_ranks)


_reduce_scatter.register_fake(lambda x, _, num_ranks: x.new_empty(x.shape[0] // num_ranks, *x.shape[1:]))


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.num_ranks = inputs


_all_gather.register_autograd(
    lambda ctx, grad: (_reduce_scatter(grad, ctx.group, ctx.num_ranks), None, None), setup_context=_save_group
)
_reduce_scatter.register_autograd(
    lambda ctx, grad: (_all_gather(grad, ctx.group, ctx.num_ranks), None, None), setup_context=_save_group
)


def sum_of_parts(parts: Tensor, num_ranks: int) -> Tensor:
    """Sum the P parts of each row in rank order and at least fp32: [P·T, ...] -> [T, ...]."""
    dtype = torch.promote_types(parts.dtype, torch.float32)
    # copy=True: compiled torch 2.11 loses a gradient that ends in a cast to its own dtype
    return parts.unflatten(0, (num_ranks, -1)).sum(0, dtype=dtype).to(parts.dtype, copy=True)


def all_to_all(
    x: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    group: dist.ProcessGroup,
    row_format: str = COMPUTE,
    gradient_format: str = COMPUTE,
) -> Tensor:
    """Send `sent[p]` rows of x to each rank p and receive `received[p]` rows from it, in rank order.

    Rows are sent in `row_format`, their gradients in `gradient_format` (`FORMATS`).

    Shapes: [sum(sent), ...] -> [sum(received), ...].
    """
    return _all_to_all(x, received, sent, group.group_name, row_format, gradient_format)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the rows of all ranks in rank order: [T, ...] -> [P·T, ...]; T must be equal on all ranks."""
    return _all_gather(x, group.group_name, group.size())


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks in at least fp32; each rank gets its rows: [P·T, ...] -> [T, ...]."""
    return _reduce_scatter(x, group.group_name, group.size())


class Collective(NamedTuple):
    """A collective in two halves, which take the same arguments after the first one."""

    start: Callable[..., Any]
    """Start to send rows: -> a pending result, which only `wait` may read."""
    wait: Callable[..., Tensor]
    """Pending result of `start` -> the received rows."""


class Collectives(NamedTuple):
    """The collectives of a dispatcher, synchronous or asynchronous."""

    all_to_all: Collective
    """(x, received, sent, group, row_format, gradient_format), as the function of that name."""
    all_gather: Collective
    """(x, group)"""
    reduce_scatter: Collective
    """(x, group)"""


def _no_wait(x: Tensor, *_: Any) -> Tensor:
    return x


SYNC = Collectives(
    Collective(all_to_all, _no_wait), Collective(all_gather, _no_wait), Collective(reduce_scatter, _no_wait)
)
"""Complete when started: on a GPU, the stream that starts a collective waits for it at once."""
