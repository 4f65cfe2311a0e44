"""The peak of memory over a run, through changes of the arena and of recordings."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.metrics.throughput import GIB, peak_memory_gib


class PeakMemory:
    """The peak of a GPU's memory, with the arena and without it.

    The allocator's own peak says neither: it counts an arena that is gone, and it does not count what pools of CUDA
    graphs hold without a tensor in it, though replays use it and nothing else can. So each change of these sizes ends
    a peak of the allocator and begins another.

    On a CPU `gib` is the peak of the process, and `bytes_beside_arena` is 0.
    """

    def __init__(
        self, capacity: ExpertCapacity, bytes_of_first_recording: int = 0, bytes_of_first_bounded_step: int = 0
    ) -> None:
        self.bytes_of_first_recording = bytes_of_first_recording
        """By how much the first recording will raise the peak, estimated; 0 once the peak counts its pool."""
        self.bytes_of_first_bounded_step = bytes_of_first_bounded_step
        """By how much the first step with a bound on each layer will raise the peak of steps in pieces, estimated; 0
        once there has been one."""
        self.capacity, self.device = capacity, capacity.need.device
        self.idle_pool_bytes = 0
        """Of the recordings that exist."""
        self.bytes_before = 0
        """The peak between `reset` and the last change of sizes."""
        self.bytes_before_beside_arena = 0
        """The peak without the arena, from the start to the last change of sizes."""

    @property
    def gib(self) -> float:
        """The peak since `reset`, in GiB."""
        if self.device.type != "cuda":
            return peak_memory_gib(self.device)
        return max(self.bytes_before, self._bytes_now()) / GIB

    @property
    def bytes_beside_arena(self) -> int:
        """The peak since the start without the arena: what another arena must leave room for."""
        if self.device.type != "cuda":
            return 0
        arena = self.capacity.arena
        of_arena = 0 if arena is None else arena.num_bytes
        return max(self.bytes_before_beside_arena, self._bytes_now() - of_arena)

    @property
    def bytes_to_come(self) -> int:
        """By how much what has not run yet will raise the peak, estimated."""
        return self.bytes_of_first_recording + self.bytes_of_first_bounded_step

    def reset(self) -> None:
        """Start a new peak. The one without the arena is kept."""
        with self.changing():
            pass
        self.bytes_before = 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change sizes within a `with` block, which must not hold more than before or after it."""
        if self.device.type != "cuda":
            yield
            return
        self.bytes_before_beside_arena = self.bytes_beside_arena
        self.bytes_before = max(self.bytes_before, self._bytes_now())
        yield
        torch.cuda.reset_peak_memory_stats(self.device)

    def hold_in_pools(self, num_bytes: int) -> None:
        """Count so many idle bytes of pools from now on, beside what is allocated from now on. A run has one graph at a
        time, so no capture takes them again."""
        with self.changing():
            self.idle_pool_bytes = num_bytes
        if num_bytes:
            self.bytes_of_first_recording = 0

    def _bytes_now(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) + self.idle_pool_bytes
