"""Copies of tensors in the memory of the host, from a block's forward to its backward.

Copies in both directions run on one stream beside that of the blocks, so that a place in the host's memory can be used
again at once. A tensor on its way out stays on the GPU until two more blocks have begun: the stream of the blocks then
waits for its copy, and PyTorch's allocator can use its memory again. The backward of a block begins to bring back the
tensors of the block before, into memory of the stream of the blocks, which waits where a tensor is read. There are only
events between the streams, and no memory that is allocated after the first step: a CUDA graph can record all of it.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

CHUNK_BYTES = 2**28
"""Pinned memory is allocated in powers of two, of at least so many bytes."""
ALIGNMENT = 512
MOST_LAYERS = 2
"""Blocks whose tensors are on their way at a time, in one direction. The peak counts them (plan/pipeline/parts.py)."""


class Stream(Protocol):
    """Where copies run."""

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy after what the current stream has to do by now. Returns what tells the end."""
        ...

    def wait(self, end: Any) -> None:
        """Let the current stream go on only after the end of a copy."""
        ...

    def host_memory(self, num_bytes: int) -> Tensor:
        """Bytes of the host that a copy can reach."""
        ...


class CopyStream:
    """A stream of a GPU beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Copy beside the current stream."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, end: torch.cuda.Event) -> None:
        """Let the current stream wait."""
        torch.cuda.current_stream(self.device).wait_event(end)

    def host_memory(self, num_bytes: int) -> Tensor:
        """Pinned memory.

        Raises: RuntimeError during a capture, which cannot allocate any.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"memory.offload needs {num_bytes:,} more bytes of the host than in the steps before, and a CUDA graph "
                "is recorded: sizes must not change"
            )
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class NoStream:
    """Copies at once, on a CPU."""

    def copy(self, target: Tensor, source: Tensor) -> bool:
        """Copy."""
        target.copy_(source)
        return True

    def wait(self, end: bool) -> None:
        """The copy has ended."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """More memory of the CPU."""
        return torch.empty(num_bytes, dtype=torch.uint8)


class Places:
    """Memory of the host, of which each place is used again for tensors of its size."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self.allocate = allocate
        self.num_bytes = 0  # of all places
        self._free = defaultdict[int, list[Tensor]](list)
        self._rest = torch.empty(0, dtype=torch.uint8)  # of the last chunk

    def take(self, num_bytes: int) -> Tensor:
        """A place of so many bytes."""
        if free := self._free[num_bytes]:
            return free.pop()
        whole = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if len(self._rest) < whole:
            self._rest = self.allocate(max(CHUNK_BYTES, 1 << (whole - 1).bit_length()))
        place, self._rest = self._rest[:num_bytes], self._rest[whole:]
        self.num_bytes += whole
        return place

    def give_back(self, place: Tensor) -> None:
        """Let it be used again, by copies after those that are ordered by now."""
        self._free[len(place)].append(place)


class Copies:
    """The copies of all blocks of a rank."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.places = stream, Places(stream.host_memory)
        self.recent = deque[OfBlock]()
        """Those on their way out."""

    def keep(self, tensor: Tensor) -> "Copy":
        """Begin to copy all memory that a tensor lies in, for the block whose forward has begun last."""
        num_elements = tensor.untyped_storage().nbytes() // tensor.itemsize
        place = self.places.take(num_elements * tensor.itemsize)
        copy = Copy(self, self.recent[-1], place, tensor.detach().as_strided((num_elements,), (1,), 0))
        self.recent[-1].add(copy)
        return copy

    def begin(self) -> "OfBlock":
        """Begin the copies of a forward of a block. Those of the block `MOST_LAYERS` before leave the GPU."""
        if len(self.recent) == MOST_LAYERS:
            for copy in self.recent.popleft().alive:
                copy.leave()
        self.recent.append(OfBlock(self.recent[-1] if self.recent else None))
        return self.recent[-1]


class OfBlock:
    """The copies of one forward of a block. Nothing but their readers keep them alive."""

    def __init__(self, before: "OfBlock | None") -> None:
        self._before = ref(before) if before is not None else lambda: None
        self._copies: list[ref[Copy]] = []
        self._is_asked = False

    @property
    def alive(self) -> "list[Copy]":
        """Those that backward has not read yet."""
        return [copy for reference in self._copies if (copy := reference()) is not None]

    def add(self, copy: "Copy") -> None:
        """One more."""
        self._copies.append(ref(copy))

    def ask(self) -> None:
        """Its backward begins: bring all back, and those of the block before."""
        if self._is_asked:
            return
        self._is_asked, before = True, self._before()
        for of_block in (self, before) if before is not None else (self,):
            for copy in reversed(of_block.alive):  # in the order of backward
                copy.come_back()


class Copy:
    """All memory that a tensor lies in, which the host keeps until its last reader is gone."""

    def __init__(self, copies: Copies, of_block: OfBlock, place: Tensor, value: Tensor) -> None:
        self._copies, self._of_block, self._place = copies, of_block, place
        self._on_host, self._device = place.view(value.dtype), value.device
        self._value: Tensor | None = value
        self._is_back = False
        self._end: Any = copies.stream.copy(self._on_host, value)  # of the last copy, if nothing has waited for it

    def leave(self) -> None:
        """Let go of the tensor on the GPU, after its copy."""
        if not self._is_back:
            self._wait()
            self._value = None

    def come_back(self) -> None:
        """Begin to copy it back, if it has left."""
        if self._value is None:
            self._value = torch.empty_like(self._on_host, device=self._device)
            self._end, self._is_back = self._copies.stream.copy(self._value, self._on_host), True

    def read(self) -> Tensor:
        """All of the memory, as one row."""
        self._of_block.ask()
        self.come_back()  # it was asked for before it had left
        if self._is_back:
            self._wait()
        assert self._value is not None
        return self._value

    def _wait(self) -> None:
        if self._end is not None:
            self._copies.stream.wait(self._end)
        self._end = None

    def __del__(self) -> None:
        self._wait()  # a copy may still read the tensor, or write it
        self._copies.places.give_back(self._place)
