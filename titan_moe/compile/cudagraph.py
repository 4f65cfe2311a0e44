"""Record what a step does on the GPU once, and replay it: the host then launches one thing instead of thousands.

A CUDA graph repeats the same kernels on the same memory. So what it computes must have static shapes, read its inputs
where the recording read them, and ask the host nothing; `plan/capture.py` knows which recipes are like that.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from titan_moe.kernels.recording import forget_recording

NUM_WARM_UPS = 3
"""Steps before the recording: by then all is compiled, tuned and allocated, and libraries have their workspaces."""


class Recording(NamedTuple):
    """A function that was recorded."""

    replay: Callable[[], None]
    """Do it all again."""
    release: Callable[[], None]
    """Give its memory back; it cannot be replayed any more."""
    outputs: Any
    """What the function returned: tensors that every replay fills anew."""


class Recorder:
    """Makes CUDA graphs, on a stream of its own."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def run(self, function: Callable[[], Any]) -> Any:
        """Run a function as it will be recorded, on the same stream."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            outputs = function()
        torch.cuda.current_stream().wait_stream(self.stream)
        return outputs

    def record(self, function: Callable[[], Any]) -> Recording:
        """Record a function; nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        # threads that watch over NCCL ask the device things that a recording forbids: it binds this thread alone
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                outputs = function()
        except RuntimeError:
            forget_recording(self.stream.device)
            raise
        return Recording(graph.replay, graph.reset, outputs)


class Captured:
    """A function of tensors that is recorded at its first call, and replayed at every call.

    Arguments are tensors or tuples of them (None where there is none), of the same shapes at every call; they are
    copied to where the recording reads. What is returned is valid until the next call. Run the function a few times
    before (`Recorder.run`): a recording must find all compiled and allocated.

    Raises: ValueError for arguments of other shapes than the recording's; RuntimeError if the function cannot be
    recorded, with what it did that it must not.
    """

    def __init__(self, function: Callable[..., Any], recorder: Recorder) -> None:
        self.function = function
        self.recorder = recorder
        self.recording: Recording | None = None
        self.inputs: list[Any] = []
        self.layout: Any = None

    def __call__(self, *args: Any) -> Any:
        given, layout = pytree.tree_flatten(args)
        if self.recording is None:
            self.recording = self._record(given, layout)
        self._fill(given, layout)
        self.recording.replay()
        return self.recording.outputs

    def release(self) -> None:
        """Give the recording's memory back; the next call records anew."""
        if self.recording is not None:
            self.recording.release()
        self.recording = None

    def _record(self, given: list[Any], layout: Any) -> Recording:
        self.inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in given]
        self.layout = layout
        args = pytree.tree_unflatten(self.inputs, layout)
        try:
            return self.recorder.record(lambda: self.function(*args))
        except RuntimeError as error:
            reason = error.__context__ or error  # ending a spoilt recording is an error too, and comes on top
            message = f'the step cannot be recorded as a CUDA graph: {reason}\nset compile.cudagraph = "off" to run it'
            raise RuntimeError(message) from error

    def _fill(self, given: list[Any], layout: Any) -> None:
        if layout != self.layout or _shapes(given) != _shapes(self.inputs):
            raise ValueError(
                f"recorded for {_shapes(self.inputs)}, called with {_shapes(given)}: shapes must not change"
            )
        for leaf, source in zip(self.inputs, given, strict=True):
            if isinstance(leaf, Tensor):
                leaf.copy_(source, non_blocking=True)


def _shapes(leaves: list[Any]) -> list[Any]:
    return [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
