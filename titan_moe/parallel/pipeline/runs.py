"""Forward and backward of one microbatch through a stage, each as a generator that returns the result.

A generator yields where another microbatch may run. If the stage is one autograd segment, it does not yield. If it runs
in pieces, it yields at the end of each stretch of pieces (plan/pipeline/pieces.py), where an exchange over ep is
pending. A forward and a backward in pieces that take turns hide each other's exchanges (DualPipe's pairs,
arXiv:2412.19437, section 3.2.1).
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from titan_moe.models.transformer import Transformer
from titan_moe.parallel.autograd_segment import AutogradSegment
from titan_moe.parallel.fsdp import ManualFSDP
from titan_moe.parallel.microbatch_run import MicrobatchRun, are_dense
from titan_moe.plan.pipeline.pieces import START_LAYER, stretches

Delaying = Callable[[], AbstractContextManager[Any]]
"""A context manager around the forward, or around each piece of it."""


class StageRun(Protocol):
    """The forward of a microbatch through a stage, once, and its backward, once, later."""

    def forward(self, x: Tensor) -> Generator[None, None, Tensor]:
        """-> the loss, scaled, or hidden states."""
        ...

    def backward(self, grad: Tensor, *, reduces: bool) -> Generator[None, None, Tensor | None]:
        """The gradient of what forward returned -> that of its input; None for tokens. `reduces` says whether this
        backward is to reduce the gradients of its stage."""
        ...


class WholeRun:
    """One autograd segment, under the hooks of FSDP, which know from their settings whether to reduce gradients."""

    def __init__(
        self,
        part: nn.Module,
        labels_BN: Tensor,
        document_ids_BN: Tensor | None,
        scale: Tensor | None,
        delaying: Delaying,
        read_BN: Tensor | None = None,
    ) -> None:
        """`scale` is that of the loss; None without the head. `read_BN` are the tokens, where a stage behind others
        reads them (`reads_tokens`)."""
        self.delaying = delaying
        options = {} if read_BN is None else {"read_BN": read_BN}

        def run(x: Tensor) -> tuple[Tensor]:
            out = part(x, labels_BN, document_ids_BN, **options)
            return (out if scale is None else out * scale,)

        self.segment = AutogradSegment(run)

    def forward(self, x: Tensor) -> Generator[None, None, Tensor]:
        with self.delaying():
            (out,) = self.segment(x)
        yield
        return out.detach()

    def backward(self, grad: Tensor, *, reduces: bool) -> Generator[None, None, Tensor | None]:
        (input_grad,) = self.segment.backward([grad])
        yield
        return input_grad


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
    """Stretches of pieces. A backward accumulates gradients layer by layer, or starts to reduce them."""

    def __init__(
        self,
        stage: StageInPieces,
        labels_BN: Tensor,
        document_ids_BN: Tensor | None,
        scale: Tensor | None,
        delaying: Delaying,
        read_BN: Tensor | None = None,
    ) -> None:
        """As of `WholeRun`."""
        self.stage, self.delaying = stage, delaying
        self.inputs = labels_BN, document_ids_BN, scale, read_BN
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

    def backward(self, grad: Tensor, *, reduces: bool) -> Generator[None, None, Tensor | None]:
        self.run.grads = [grad]
        for stretch in reversed(self.stage.stretches):
            for layer, name in reversed(stretch):
                self.run.backward()
                if name in START_LAYER:
                    self.stage.parameters.reduce_grads(layer, is_last=reduces)
            yield
        (input_grad,) = self.run.grads
        return input_grad
