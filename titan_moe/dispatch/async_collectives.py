"""Messages that travel under compute: one operation starts a collective, another waits for it.

P ranks of the group · T rows of one rank

Each pair is its own transpose. The backward of the wait starts the message home, and the backward of the start waits
for that one. Autograd takes up what was made last first, so what is computed between start and wait in forward is
differentiated between them in backward, and both ways are hidden by the same work.

What flows between the two halves is memory that the network still writes: only the other half may touch it. Autograd
wants the gradient of a tensor in the tensor's shape. Rows that are gathered, or summed on their way, take the shape of
both directions, P·T: they travel as P parts and are added up by whoever waits, in rank order and at least fp32, as on
the blocking wire. Rows that are sent point to point are as many as leave in one direction and as many as arrive in the
other; there both halves know a mailbox for the message home, and the gradient that was sent flows past it unread. The
results are those of the blocking wire bit for bit. Whoever cuts autograd between the halves must hand both over, the
gradient untouched and the mailbox too.

The functional collectives of PyTorch keep the handle of a message beside its tensor, hold what is sent until somebody
waits, and can be traced. They are called inside autograd functions of our own, which decide where a gradient's message
starts and where it is waited for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.dispatch.collectives import Collective, Collectives, sum_of_parts

_wait = torch.ops._c10d_functional.wait_tensor


def _exchange(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    return torch.ops._c10d_functional.all_to_all_single(x.contiguous(), list(received), list(sent), group)


def _exchange_equal_parts(x: Tensor, group: str, num_ranks: int) -> Tensor:
    rows = [x.shape[0] // num_ranks] * num_ranks
    return _exchange(x, rows, rows, group)


def _gather(x: Tensor, group: str, num_ranks: int) -> Tensor:
    if x.device.type == "cpu":
        # gloo's own spoils the heap, sooner or later, where several are under way (torch 2.11, 2.13)
        return _exchange_equal_parts(x.expand(num_ranks, *x.shape).flatten(0, 1), group, num_ranks)
    return torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), num_ranks, group)


def reach_in_recompute(ctx: Any, x: Tensor) -> None:
    """Save next to nothing, in the wait for a message: recompute stops after the last tensor that backward needs, and
    one that it has started by then, but not waited for, would be held for ever."""
    ctx.save_for_backward(x.new_empty(0))


class GradientHandle:
    """Where the message home lies, from the backward of the wait to that of the start."""

    def __init__(self) -> None:
        self.message: Tensor | None = None

    def take(self) -> Tensor:
        """The message, which is then gone from here."""
        message, self.message = self.message, None
        assert message is not None, "the backward of the wait comes first"
        return message


class Rows(NamedTuple):
    """Rows on their way from rank to rank, and where their gradients will come home."""

    x: Tensor
    home: GradientHandle


class _StartAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, home: GradientHandle, received: Sequence[int], sent: Sequence[int], group: str
    ) -> Tensor:
        ctx.home = home
        return _exchange(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _wait(ctx.home.take()), None, None, None, None


class _WaitAllToAll(torch.autograd.Function):
    """Eager only, as all who send point to point: their sizes come from the host."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, home: GradientHandle, received: Sequence[int], sent: Sequence[int], group: str
    ) -> Tensor:
        reach_in_recompute(ctx, x)
        ctx.home, ctx.received, ctx.sent, ctx.group = home, received, sent, group
        return _wait(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.home.message = _exchange(grad, ctx.sent, ctx.received, ctx.group)
        return grad, None, None, None, None


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
        reach_in_recompute(ctx, x)
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
        reach_in_recompute(ctx, parts)
        ctx.group, ctx.num_ranks = group, num_ranks
        return sum_of_parts(_wait(parts), num_ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.group, ctx.num_ranks), None, None


def _start_all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Rows:
    home = GradientHandle()
    return Rows(_StartAllToAll.apply(x, home, received, sent, group.group_name), home)


def _wait_all_to_all(rows: Rows, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    return _WaitAllToAll.apply(*rows, received, sent, group.group_name)


def _start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _StartAllGather.apply(x, group.group_name, group.size())


def _wait_all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _WaitAllGather.apply(x, group.group_name, group.size())


def _start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _StartReduceScatter.apply(x, group.group_name, group.size())


def _wait_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _WaitReduceScatter.apply(x, group.group_name, group.size())


ASYNC = Collectives(
    Collective(_start_all_to_all, _wait_all_to_all),
    Collective(_start_all_gather, _wait_all_gather),
    Collective(_start_reduce_scatter, _wait_reduce_scatter),
)
"""A message travels until it is waited for."""
