"""Heartbeats of all ranks, over the store of the process group."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist

STORE_TIMEOUT_S = 5.0
WAITING_FRAMES = 4
"""A rank waits for others if one of its innermost frames is in torch.distributed."""


@dataclass(frozen=True)
class Sign:
    """The content of a heartbeat: the state of a rank."""

    number: int = 0
    """Number of heartbeats so far; it increases while the process runs."""
    task: str = "its start"
    place: str = ""
    """Where its main thread is: function, file and line."""
    is_waiting: bool = False
    """Whether it waits for other ranks."""
    has_left: bool = False
    """Whether it has ended its part of the run."""


@dataclass
class Heartbeat:
    """Write a heartbeat of this rank every `interval_s` seconds, and watch those of the next rank.

    A process that is stopped, or whose host is lost, writes none. Each rank watches one other rank, so the load of the
    store grows with the number of ranks, not with its square.
    """

    store: dist.Store
    rank: int
    num_ranks: int
    interval_s: float
    describe: Callable[[], Sign]
    silence_s: float = 0.0
    """Seconds without a new heartbeat of the next rank, while this process and the store ran."""
    _number: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        self.next_rank = (self.rank + 1) % self.num_ranks
        self.give()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def give(self, has_left: bool = False) -> None:
        """Write a heartbeat of this rank."""
        self._number += 1
        sign = asdict(self.describe()) | {"number": self._number, "has_left": has_left}
        self.store.set(f"{self.rank}", json.dumps(sign))

    def read(self, rank: int) -> Sign | None:
        """The newest heartbeat of a rank; None before its first one."""
        key = f"{rank}"
        return Sign(**json.loads(self.store.get(key))) if self.store.check([key]) else None

    def others(self) -> Iterator[tuple[int, Sign, bool]]:
        """Yield each other rank, its newest heartbeat, and whether its process runs. Takes some intervals, and blocks
        while the store does not answer."""
        before = {rank: self.read(rank) for rank in range(self.num_ranks) if rank != self.rank}
        time.sleep(3 * self.interval_s)
        for rank, sign in before.items():
            newest = self.read(rank)
            yield rank, newest or Sign(), newest is not None and (newest != sign or newest.has_left)

    def leave(self) -> None:
        """Write a last heartbeat that says that this rank has left, so that no other rank reports it as late."""
        self._ended.set()
        self._thread.join(STORE_TIMEOUT_S)
        if not self._thread.is_alive():
            with suppress(RuntimeError):  # the store's host may have ended before
                self.give(has_left=True)

    def _run(self) -> None:
        seen, read_at = None, time.monotonic()
        while not self._ended.wait(self.interval_s):
            try:
                self.give()
                sign = self.read(self.next_rank)
            except RuntimeError:  # the store does not answer: nothing is known of the next rank
                read_at = time.monotonic()
                continue
            now = time.monotonic()
            if sign != seen or (sign is not None and sign.has_left):
                self.silence_s = 0.0
            else:
                self.silence_s += min(now - read_at, 2 * self.interval_s)
            seen, read_at = sign, now


def open_store() -> dist.Store | None:
    """Open a separate connection to the store of the process group, because a connection that waits is locked for other
    threads. None for one rank, or for a store without connections."""
    if dist.get_world_size() == 1:
        return None
    try:
        return dist.PrefixStore("titan_moe/heartbeat", dist.distributed_c10d._get_default_store().clone())
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def main_thread_place() -> tuple[str, bool]:
    """Where the main thread is, outside of PyTorch if possible, and whether it waits for other ranks."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    if not frames:
        return "", False
    files = [Path(each.f_code.co_filename) for each in frames]
    is_waiting = any({"torch", "distributed"} <= set(file.parts) for file in files[:WAITING_FRAMES])
    own = next((index for index, file in enumerate(files) if "torch" not in file.parts), 0)
    return f"{frames[own].f_code.co_name} ({files[own].name}:{frames[own].f_lineno})", is_waiting
