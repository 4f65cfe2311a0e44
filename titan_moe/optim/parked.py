"""Optimizer states that rest in pinned host memory between steps, and are on the device by turns during one.

An optimizer step goes through its shards in chunks. While a chunk is updated, the next one is copied to the device and
the one before back to the host, on a stream of their own. So the device has two chunks at a time, in memory that the
activations of forward and backward had. Addresses on the host do not change, what is allocated on the device is freed
in the same step, and nothing waits for the host: a CUDA graph can capture it.

Physics: a step moves all parked bytes in and out. The link to the host carries some 32 GB/s in all, in one direction or
both, so a step becomes longer by parked bytes · 2 / 32 GB/s: it pays where many microbatches share it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from titan_moe.config.perf import PARKED, PARKED_CHUNK_BYTES, Park
from titan_moe.optim.moments_8bit import map_parts
from titan_moe.parameters import local


def rest_on_host(value: Tensor) -> Tensor:
    """A copy of a state in host memory, pinned where there is a GPU; sharded as the state is."""
    plain = map_parts(local(value), _pinned)
    # not from_local: it moves the shard to the device of the mesh
    return DTensor(plain, value._spec, requires_grad=False) if isinstance(value, DTensor) else plain


def _pinned(part: Tensor) -> Tensor:
    host = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
    return host.copy_(part)


class _Chunk(NamedTuple):
    """Shards and the copies of their states on the device."""

    shards: Sequence[Any]
    copies: list[Any]
    event: Any
    """Recorded after the last copy in or out; None without streams."""


class Window:
    """The states of shards, on the device by turns."""

    def __init__(self, park: Park, device: torch.device) -> None:
        self.fields, self.device = PARKED[park], device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, shards: Sequence[Any], update: Callable[[list[Any]], None]) -> None:
        """Update shards whose states are on the device, chunk after chunk, and copy these back."""
        chunks = list(self._chunks(shards))
        coming, leaving = deque([self._bring(chunks[0])]), deque[_Chunk]()
        for following in [*chunks[1:], None]:
            while leaving:
                self._wait(leaving.pop())  # then its memory is free for the one that follows
            if following is not None:
                coming.append(self._bring(following))
            self._wait(coming[0])
            update(coming[0].copies)
            leaving.append(self._take_back(coming.popleft()))
        self._wait(leaving.pop())

    def finish(self) -> None:
        """Wait on the host for the end of all copies."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)

    def _chunks(self, shards: Sequence[Any]) -> Iterator[list[Any]]:
        chunk: list[Any] = []
        num_bytes = 0
        for shard in shards:
            size = sum(part.nbytes for part in self._parked(shard))
            if chunk and num_bytes + size > PARKED_CHUNK_BYTES:
                yield chunk
                chunk, num_bytes = [], 0
            chunk.append(shard)
            num_bytes += size
        if chunk:
            yield chunk

    def _parked(self, shard: Any) -> list[Tensor]:
        leaves = pytree.tree_leaves([getattr(shard, name) for name in self.fields])
        return [leaf for leaf in leaves if leaf is not None]

    def _bring(self, shards: Sequence[Any]) -> _Chunk:
        """Start to copy states to the device. The memory is that of the current stream, as activations were."""
        copies = [
            shard._replace(**{name: pytree.tree_map(self._room_for, getattr(shard, name)) for name in self.fields})
            for shard in shards
        ]
        return _Chunk(shards, copies, self._copy(shards, copies))

    def _take_back(self, chunk: _Chunk) -> _Chunk:
        """Start to copy states to the host."""
        return chunk._replace(event=self._copy(chunk.copies, chunk.shards))

    def _room_for(self, part: Tensor | None) -> Tensor | None:
        return None if part is None else torch.empty_like(part, device=self.device)

    def _copy(self, sources: Sequence[Any], targets: Sequence[Any]) -> Any:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            for source, target in zip(sources, targets, strict=True):
                for new, old in zip(self._parked(source), self._parked(target), strict=True):
                    old.copy_(new, non_blocking=True)
            return None if self.stream is None else self.stream.record_event()

    def _wait(self, chunk: _Chunk) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(chunk.event)
