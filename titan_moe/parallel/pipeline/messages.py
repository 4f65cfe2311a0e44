"""Activations and their gradients between the stages of a pipeline, in buffers that a rank uses again.

NCCL sends and receives on a stream of its own. Memory that two streams use (`record_stream`) and that is freed during
the capture of a CUDA graph may not be used again before its end, so without buffers a graph would hold the messages of
all microbatches.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.plan.pipeline.action import KEPT_SENDS
from titan_moe.profile.region import MESSAGES, region


def activations_like(tokens_BN: Tensor, tp: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor with the shape, dtype and device of a rank's activations between stages for these tokens. All of
    its elements share one memory location."""
    shape = len(tokens_BN), tokens_BN.shape[1] // tp, hidden_size
    return torch.empty(1, dtype=dtype, device=tokens_BN.device).expand(shape)


def check_activation(tensor: Tensor, like: Tensor) -> None:
    """Raise a RuntimeError if the receiver expects another shape or dtype: it would read wrong numbers, or hang."""
    if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
        raise RuntimeError(
            f"a pipeline stage returns {tensor.dtype} {list(tensor.shape)}, and between stages are {like.dtype} "
            f"{list(like.shape)}: the hidden states of a microbatch in precision.compute; let the blocks return these"
        )


class Received:
    """A tensor whose receive is pending."""

    def __init__(self, tensor: Tensor, work: dist.Work | None) -> None:
        self.tensor, self.work = tensor, work

    def wait(self) -> Tensor:
        """The tensor; on a GPU the current stream waits, not the host."""
        if self.work is not None:
            with region(MESSAGES):
                self.work.wait()
            self.work = None  # gloo would wait for another
        return self.tensor


class Messages:
    """Sends and receives tensors of one shape between ranks of a pipeline.

    A receive is posted as soon as the schedule allows, and what computes waits for its input. Every pair of ranks posts
    its messages in the same order, which the schedule fixes, so none waits for one behind it. The receive of a message
    is in the peer's list before all that needs a later message of this rank, so a wait for an earlier send is safe too.
    A message waits for what the current stream has done, so it may write into a buffer that was read before.
    """

    def __init__(self, group: dist.ProcessGroup, like: Tensor) -> None:
        """Tensors have the shape, dtype and device of `like`."""
        self.group, self.like = group, like
        self.idle: list[Tensor] = []
        self.sent = deque[tuple[Tensor, dist.Work | None]]()

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a copy of a tensor to a rank of the group.

        Raises: RuntimeError for another shape or dtype than the receiver has room for.
        """
        check_activation(tensor, self.like)
        with region(MESSAGES):
            if len(self.sent) == KEPT_SENDS:
                self._finish_oldest()
            buffer = self._buffer().copy_(tensor.detach())
            self.sent.append((buffer, dist.isend(buffer, group=self.group, group_dst=rank)))

    def receive(self, rank: int) -> Received:
        """Receive a tensor from a rank of the group. It is valid until it is given to `free`."""
        buffer = self._buffer()
        with region(MESSAGES):
            return Received(buffer, dist.irecv(buffer, group=self.group, group_src=rank))

    def free(self, buffer: Tensor) -> None:
        """Let another message use a received tensor, after all that the current stream still reads of it."""
        self.idle.append(buffer)

    def finish(self) -> None:
        """Wait for all that was sent."""
        while self.sent:
            with region(MESSAGES):
                self._finish_oldest()

    def _buffer(self) -> Tensor:
        return self.idle.pop() if self.idle else torch.empty_like(self.like)

    def _finish_oldest(self) -> None:
        buffer, work = self.sent.popleft()
        if work is not None:
            work.wait()
        self.free(buffer)
