"""Asynchronous collectives that overlap with compute: one op starts a collective, another waits for it.

P ranks of the group · T rows of one rank

The backward of the wait starts the collective of the gradient, and the backward of the start waits for it. Autograd
runs in reverse order, so work between start and wait in forward has its backward between the two in backward, and both
directions overlap with the same work.

The network still writes the tensor between the two halves: only the wait may use it. Autograd requires its gradient to
have its shape. In an all-gather and in a reduce-scatter both have P·T rows: P parts are exchanged, and the wait sums
them as the synchronous collectives do. An all-to-all sends and receives different numbers of rows. So its two halves
share a `GradientHandle`, which holds the pending gradient, and the gradient that autograd passes from wait to start is
not read. Code that cuts the autograd graph between the halves must pass on both. Results are bit for bit those of the
synchronous collectives.

PyTorch's functional collectives keep the handle with the tensor and the sent tensor alive until the wait, and can be
traced. Our autograd functions around them decide where the collective of a gradient starts and is waited for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.dispatch.collectives import Collective, Collectives, sum_of_parts
from titan_moe.kernels.experts.formats import COMPUTE, FORMATS

_wait = torch.ops._c10d_functional.wait_tensor


def _exchange(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    return torch.ops._c10d_functional.all_to_all_single(x.contiguous(), list(received), list(sent), group)


def _exchange_equal_parts(x: Tensor, group: str, num_ranks: int) -> Tensor:
    rows = [x.shape[0] // num_ranks] * num_ranks
    return _exchange(x, rows, rows, group)


def _gather(x: Tensor, group: str, num_ranks: int) -> Tensor:
    if x.device.type == "cpu":
        # several pending all-gathers of gloo corrupt the heap sooner or later (torch 2.11, 2.13)
        return _exchange_equal_parts(x.expand(num_ranks, *x.shape).flatten(0, 1), group, num_ranks)
    return torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), num_ranks, group)


def save_empty_for_recompute(ctx: Any, x: Tensor) -> None:
    """Save an empty tensor in the wait. Recompute stops after the last saved tensor; a collective that it has started
    by then, but not waited for, would be kept for ever."""
    ctx.save_for_backward(x.new_empty(0))


class GradientHandle:
    """Holds the pending gradient from the backward of the wait to that of the start."""

    def __init__(self) -> None:
        self.pending: Tensor | None = None

    def take(self) -> Tensor:
        """Return the pending gradient and drop it here."""
        pending, self.pending = self.pending, None
        assert pending is not None, "the backward of the wait must run before that of the start"
        return pending


class PendingRows(NamedTuple):
    """The rows of a pending all-to-all, and the handle of their gradients."""

    x: Tensor
    handle: GradientHandle


class _StartAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, handle: GradientHandle, received: Sequence[int], sent: Sequence[int], group: str,
        row_format: str, gradient_format: str,
    ) -> Tensor:  # fmt: skip
        ctx.handle, ctx.gradient_format = handle, gradient_format
        return _exchange(FORMATS[row_format].pack(x), received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return FORMATS[ctx.gradient_format].unpack(_wait(ctx.handle.take())), *(None,) * 6


class _WaitAllToAll(torch.autograd.Function):
    """Eager only, like all-to-all dispatch: the host reads its sizes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, handle: GradientHandle, received: Sequence[int], sent: Sequence[int], group: str,
        row_format: str, gradient_format: str,
    ) -> Tensor:  # fmt: skip
        save_empty_for_recompute(ctx, x)
        ctx.handle, ctx.received, ctx.sent, ctx.group = handle, received, sent, group
        ctx.gradient_format, ctx.shape = gradient_format, x.shape
        return FORMATS[row_format].unpack(_wait(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed = FORMATS[ctx.gradient_format].pack(grad)
        ctx.handle.pending = _exchange(packed, ctx.sent, ctx.received, ctx.group)
        # of the shape that autograd requires, and never read
        return grad if grad.shape == ctx.shape else grad.new_empty(()).expand(ctx.shape), *(None,) * 6


class _StartAllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return _gather(x, group, num_ranks)

    @staticmethod
    def backward(ctx: Any, parts: Tensor) -> tuple[Tensor, None, None]:
        return sum_of_parts(_wait(parts), ctx.num_ranks), None, None


class _WaitAllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, num_ranks: int) -> Tensor:
        save_empty_for_recompute(ctx, x)
        ctx.group, ctx.num_ranks = group, num_ranks
        return _wait(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchange_equal_parts(grad, ctx.group, ctx.num_ranks), None, None


class _StartReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, num_ranks: int) -> Tensor:
        return _exchange_equal_parts(x, group, num_ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _wait(grad), None, None


class _WaitReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: str, num_ranks: int) -> Tensor:
        save_empty_for_recompute(ctx, parts)
        ctx.group, ctx.num_ranks = group, num_ranks
        return sum_of_parts(_wait(parts), num_ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.group, ctx.num_ranks), None, None


def _start_all_to_all(
    x: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    group: dist.ProcessGroup,
    row_format: str = COMPUTE,
    gradient_format: str = COMPUTE,
) -> PendingRows:
    handle = GradientHandle()
    pending = _StartAllToAll.apply(x, handle, received, sent, group.group_name, row_format, gradient_format)
    return PendingRows(pending, handle)


def _wait_all_to_all(
    rows: PendingRows,
    received: Sequence[int],
    sent: Sequence[int],
    group: dist.ProcessGroup,
    row_format: str = COMPUTE,
    gradient_format: str = COMPUTE,
) -> Tensor:
    return _WaitAllToAll.apply(*rows, received, sent, group.group_name, row_format, gradient_format)


ASYNC = Collectives(
    Collective(_start_all_to_all, _wait_all_to_all),
    Collective(
        lambda x, group: _StartAllGather.apply(x, group.group_name, group.size()),
        lambda x, group: _WaitAllGather.apply(x, group.group_name, group.size()),
    ),
    Collective(
        lambda x, group: _StartReduceScatter.apply(x, group.group_name, group.size()),
        lambda x, group: _WaitReduceScatter.apply(x, group.group_name, group.size()),
    ),
)
"""Pending until waited for."""
