"""Capture the GPU work of a step as a CUDA graph and replay it: one launch from the host instead of thousands.

A CUDA graph repeats the same kernels on the same memory. The captured function must have static shapes, read its inputs
at fixed addresses, and never synchronise with the host. `config/rules/capture.py` lists the recipes that cannot.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from titan_moe.kernels.recording import forget_recording

NUM_WARM_UPS = 3
"""Steps before the capture. They compile, autotune and allocate, and create the workspaces of libraries."""


class Recording(NamedTuple):
    """A captured function."""

    replay: Callable[[], None]
    """Run the captured work again."""
    release: Callable[[], None]
    """Free its memory. It cannot be replayed afterwards."""
    outputs: Any
    """The tensors that the function returned. Every replay overwrites them."""


class Recorder:
    """Captures CUDA graphs on a side stream."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def run(self, function: Callable[[], Any]) -> Any:
        """Run a function on the stream of the capture, as a warm-up."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            outputs = function()
        torch.cuda.current_stream().wait_stream(self.stream)
        return outputs

    def record(self, function: Callable[[], Any]) -> Recording:
        """Capture a function. Nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog threads make calls that a capture forbids, so the capture checks only this thread
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                outputs = function()
        except RuntimeError:
            forget_recording(self.stream.device)
            raise
        return Recording(graph.replay, graph.reset, outputs)


def idle_pool_bytes(device: torch.device) -> int:
    """The bytes that private memory pools on a GPU hold without a tensor in them: those of CUDA graphs, and others that
    a user has made. 0 on a CPU, and where CUDA's own allocator is used, which shows no pools.

    Replays use this memory, and nothing else can. PyTorch does not count it as allocated.
    """
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return 0
    segments = torch.cuda.memory_snapshot(include_traces=False)
    of_pools = [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(pool["total_size"] - pool["allocated_size"] for pool in of_pools if pool["device"] == device.index)


class Captured:
    """A function of tensors that is captured at its first call and replayed at every call.

    Arguments are tensors, tuples of them, or None, of equal shapes at every call. They are copied into the input
    buffers of the graph. The outputs are valid until the next call. Warm the function up with `Recorder.run` before the
    first call.

    Raises: ValueError for arguments of other shapes; RuntimeError if the function cannot be captured, with the reason.
    """

    def __init__(self, function: Callable[..., Any], recorder: Recorder) -> None:
        self.function, self.recorder = function, recorder
        self.recording: Recording | None = None
        self.num_recordings = 0  # so far
        self.inputs: list[Any] = []
        self.layout: Any = None

    def __call__(self, *args: Any) -> Any:
        given, layout = pytree.tree_flatten(args)
        if self.recording is None:
            self.recording = self._record(given, layout)
            self.num_recordings += 1
        shapes, given_shapes = _shapes(self.inputs), _shapes(given)
        if layout != self.layout or given_shapes != shapes:
            raise ValueError(f"captured for {shapes}, called with {given_shapes}: shapes must not change")
        for leaf, source in zip(self.inputs, given, strict=True):
            if isinstance(leaf, Tensor):
                leaf.copy_(source, non_blocking=True)
        self.recording.replay()
        return self.recording.outputs

    def release(self) -> None:
        """Free the graph's memory and its input buffers. The next call captures again."""
        if self.recording is not None:
            self.recording.release()
        self.recording, self.inputs, self.layout = None, [], None

    def _record(self, given: list[Any], layout: Any) -> Recording:
        self.inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in given]
        self.layout = layout
        args = pytree.tree_unflatten(self.inputs, layout)
        try:
            return self.recorder.record(lambda: self.function(*args))
        except RuntimeError as error:
            reason = error.__context__ or error  # ending an invalid capture raises a second error
            message = f"the step cannot be captured as a CUDA graph: {reason}"
            raise RuntimeError(f'{message}\nset compile.cudagraph = "off" to run it') from error


def _shapes(leaves: list[Any]) -> list[Any]:
    return [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
