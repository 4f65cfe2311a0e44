"""Forward and backward of one microbatch through a stage, each as a generator that returns the result.

A generator yields where another microbatch may run. If the stage is one autograd segment, it does not yield. If it runs
in pieces, it yields at the end of each stretch of pieces (plan/schedule.py), where an exchange over ep is pending. A
forward and a backward in pieces that take turns hide each other's exchanges (DualPipe's pairs, arXiv:2412.19437,
section 3.2.1).

A replayed run is two CUDA graphs, or three: forward, backward, delayed weight gradients. All microbatches that one
place of a stage has, one after the other, replay the same graphs (graphs.py).
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from titan_moe.compile.cudagraph import Captured
from titan_moe.kernels.delayed_weight_grads import PendingWeightGrads, WeightGradQueue
from titan_moe.models.transformer import Transformer
from titan_moe.parallel import fsdp
from titan_moe.parallel.autograd_segment import AutogradSegment
from titan_moe.parallel.fsdp import ManualFSDP
from titan_moe.parallel.microbatch_run import MicrobatchRun, are_dense
from titan_moe.plan.schedule import START_LAYER, stretches

Delaying = Callable[[], AbstractContextManager[Any]]
"""A context manager around the forward, or around each piece of it."""


def delaying_to(pending: PendingWeightGrads | None, queue: WeightGradQueue | None) -> Delaying:
    """Let the layers leave the weight gradients of a forward, or of a piece of it, to `pending`, if there is one."""
    if pending is None:
        return nullcontext
    assert queue is not None, "the schedule splits backwards"
    return partial(queue.delaying, pending)


class StageRun(Protocol):
    """The forward of a microbatch through a stage, once, and its backward, once, later."""

    def forward(self, x: Tensor) -> Generator[None, None, Tensor]:
        """-> the loss, scaled, or hidden states."""
        ...

    def backward(self, grad: Tensor) -> Generator[None, None, Tensor | None]:
        """The gradient of what forward returned -> that of its input; None for tokens."""
        ...


class WholeRun:
    """One autograd segment, under the hooks of FSDP."""

    def __init__(
        self,
        part: nn.Module,
        labels_BN: Tensor,
        document_ids_BN: Tensor | None,
        scale: Tensor | None,
        delaying: Delaying,
    ) -> None:
        """`scale` is that of the loss; None without the head."""
        self.delaying = delaying

        def run(x: Tensor) -> tuple[Tensor]:
            out = part(x, labels_BN, document_ids_BN)
            return (out if scale is None else out * scale,)

        self.segment = AutogradSegment(run)

    def forward(self, x: Tensor) -> Generator[None, None, Tensor]:
        out = self.run_forward(x)
        yield
        return out

    def backward(self, grad: Tensor) -> Generator[None, None, Tensor | None]:
        input_grad = self.run_backward(grad)
        yield
        return input_grad

    def run_forward(self, x: Tensor) -> Tensor:
        """`forward` at once."""
        with self.delaying():
            (out,) = self.segment(x)
        return out.detach()

    def run_backward(self, grad: Tensor) -> Tensor | None:
        """`backward` at once."""
        (input_grad,) = self.segment.backward([grad])
        return input_grad


class StageActions:
    """What a stage computes for the microbatches of one place, one after the other, as functions that are captured.

    Every one begins and ends with the same state of FSDP, so all microbatches are alike. Either parameters are
    unsharded during a step, outside of these functions (`keeps_unsharded`): then none gathers or reduces. Or each
    gathers what it needs, and a backward reduces its gradients.
    """

    def __init__(
        self, part: nn.Module, queue: WeightGradQueue | None, *, is_split: bool, keeps_unsharded: bool
    ) -> None:
        """`queue` is that of a backward that is split."""
        self.part, self.queue = part, queue
        self.is_split, self.keeps_unsharded = is_split, keeps_unsharded
        self.run: WholeRun
        self.pending: PendingWeightGrads | None = None

    def forward(self, x: Tensor, labels_BN: Tensor, document_ids_BN: Tensor | None, scale: Tensor | None) -> Tensor:
        self.pending = PendingWeightGrads() if self.is_split else None
        self.run = WholeRun(self.part, labels_BN, document_ids_BN, scale, delaying_to(self.pending, self.queue))
        out = self.run.run_forward(x.requires_grad_() if x.is_floating_point() else x)
        if not self.keeps_unsharded:
            fsdp.reshard_all(self.part)  # FSDP leaves the root unsharded
        return out

    def backward(self, grad: Tensor) -> Tensor | None:
        if self.keeps_unsharded:
            fsdp.set_unsharded_accumulation(self.part, True)
        else:
            fsdp.order_gathers_after_current_stream(self.part)
        input_grad = self.run.run_backward(grad)
        if self.keeps_unsharded and not self.is_split:
            fsdp.accumulate_late_grads(self.part)
        return input_grad

    def compute_weight_grads(self) -> None:
        assert self.pending is not None, "the backward is split"
        self.pending.compute()
        fsdp.accumulate_late_grads(self.part)


class CapturedRun:
    """The CUDA graphs of a stage in one place, captured for the first of its microbatches.

    Graphs refer to actions, and actions to no graph: without such a cycle all memory is freed with the last reference.
    Python's collector of cycles runs rarely in training.
    """

    def __init__(self, actions: StageActions, capture: Callable[[Callable[..., Any], str], Captured]) -> None:
        """`capture` takes a function and its name."""
        self.forward, self.backward = capture(actions.forward, "forward"), capture(actions.backward, "backward")
        self.weight_grads = capture(actions.compute_weight_grads, "weight gradients") if actions.is_split else None

    def compute(self) -> None:
        """Compute the delayed weight gradients."""
        assert self.weight_grads is not None, "the backward is split"
        self.weight_grads()


class ReplayedRun:
    """A microbatch in its place. What graphs return is copied: other graphs of the place overwrite it."""

    def __init__(
        self, captured: CapturedRun, labels_BN: Tensor, document_ids_BN: Tensor | None, scale: Tensor | None
    ) -> None:
        """`scale` is that of the loss; None without the head."""
        self.captured = captured
        self.inputs = labels_BN, document_ids_BN, scale

    def forward(self, x: Tensor) -> Generator[None, None, Tensor]:
        out = self.captured.forward(x, *self.inputs).clone()
        yield
        return out

    def backward(self, grad: Tensor) -> Generator[None, None, Tensor | None]:
        input_grad = self.captured.backward(grad)
        yield
        return None if input_grad is None else input_grad.clone()


class StageInPieces:
    """A stage during a step whose microbatches run in pieces, past the hooks of FSDP: the first forward gathers its
    parameters, and they stay."""

    def __init__(self, part: nn.Module) -> None:
        assert isinstance(part, Transformer)
        self.part = part
        self.stretches = stretches(are_dense(part))
        self.parameters = ManualFSDP(part)
        self.awaited = {layer for layer, _ in (piece for stretch in self.stretches for piece in stretch)}
        """Layers whose parameters no forward has needed yet."""

    def prepare(self, layer: int) -> None:
        """Before the first piece of a layer: wait for its parameters, and start to gather those of the next layer."""
        if layer not in self.awaited:
            return
        self.awaited.remove(layer)
        if layer not in self.parameters.handles:
            self.parameters.gather(layer)
        self.parameters.wait(layer)
        if layer + 1 in self.awaited:
            self.parameters.gather(layer + 1)


class RunInPieces:
    """Stretches of pieces. A backward accumulates gradients layer by layer and reduces none."""

    def __init__(
        self,
        stage: StageInPieces,
        labels_BN: Tensor,
        document_ids_BN: Tensor | None,
        scale: Tensor | None,
        delaying: Delaying,
    ) -> None:
        """`scale` is that of the loss; None without the head."""
        self.stage, self.delaying = stage, delaying
        self.inputs = labels_BN, document_ids_BN, scale
        self.run: MicrobatchRun

    def forward(self, x: Tensor) -> Generator[None, None, Tensor]:
        run = self.run = MicrobatchRun(self.stage.part, x, *self.inputs)
        for stretch in self.stage.stretches:
            for layer, name in stretch:
                self.stage.prepare(layer)
                with self.delaying():
                    run.forward(layer, name)
            yield
        return run.take_output()

    def backward(self, grad: Tensor) -> Generator[None, None, Tensor | None]:
        self.run.grads = [grad]
        for stretch in reversed(self.stage.stretches):
            for layer, name in reversed(stretch):
                self.run.backward()
                if name in START_LAYER:
                    self.stage.parameters.reduce_grads(layer, is_last=False)
            yield
        (input_grad,) = self.run.grads
        return input_grad
