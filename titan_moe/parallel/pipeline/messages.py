"""Activations and their gradients between the stages of a pipeline."""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.profile.region import MESSAGES, region

KEPT_SENDS = 4
"""Number of sent tensors that a rank keeps. Before a further send it waits for the oldest one, and frees it."""


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
    """

    def __init__(self, group: dist.ProcessGroup, like: Tensor) -> None:
        """Tensors have the shape, dtype and device of `like`."""
        self.group, self.like = group, like
        self.sent = deque[tuple[Tensor, dist.Work | None]]()

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor to a rank of the group.

        Raises: RuntimeError for another shape or dtype than the receiver has room for.
        """
        check_activation(tensor, self.like)
        tensor = tensor.contiguous()
        with region(MESSAGES):
            if len(self.sent) == KEPT_SENDS:
                self._free_oldest()
            self.sent.append((tensor, dist.isend(tensor, group=self.group, group_dst=rank)))

    def receive(self, rank: int) -> Received:
        """Receive a tensor from a rank of the group."""
        tensor = torch.empty_like(self.like)
        with region(MESSAGES):
            return Received(tensor, dist.irecv(tensor, group=self.group, group_src=rank))

    def finish(self) -> None:
        """Wait for all that was sent, and free it."""
        with region(MESSAGES):
            while self.sent:
                self._free_oldest()

    def _free_oldest(self) -> None:
        _, work = self.sent.popleft()
        if work is not None:
            work.wait()
