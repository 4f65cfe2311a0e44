"""End a rank that hangs, and name the rank for which it waits.

A collective of a stopped or lost rank blocks all others inside C++, where Python raises no exception and runs no signal
handler. So a thread of its own watches the progress of the main thread, receives the signals, and ends the process.
"""

import faulthandler
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from titan_moe.config.train import RunConfig
from titan_moe.run.failure import EXIT_FAILED, record_failure
from titan_moe.run.flight_recorder import pending_collective
from titan_moe.run.heartbeat import Heartbeat, Sign, main_thread_place, open_store
from titan_moe.run.process import EXIT_BY_SIGNAL, PATIENCE, STOP_SIGNALS
from titan_moe.run.terminal import complain

TICK_S = 1.0
TICKS_PER_LIMIT = 20
HEARTBEAT_S = 2.0
STOP_GRACE_S = 20.0
"""Least time that a step gets to end after a stop signal; torchrun kills its ranks after 30 s."""
REPEATED_SIGNAL_S = 3.0
"""A signal that comes again this long after the first one is meant as a second one: SLURM and torchrun both send the
first."""
INTERRUPT_S = 2.0
"""Time for the main thread to raise KeyboardInterrupt at a second Ctrl-C."""
NO_SIGNAL = b"\0"
"""What wakes the watching thread, in place of the number of a signal."""
REPORT_S = 10.0
"""Time to find out which rank is late, and to write it."""


class Watchdog:
    """Limit the time of each step of this rank by `run.step_timeout_minutes`; a context manager.

    Time counts while this process runs: a job that is suspended as a whole, and continued, goes on. The process ends
    with exit code 1 if a step takes longer than the limit, other tasks longer than PATIENCE limits, or the next rank
    gives no sign for a limit. It ends by a stop signal if the step at hand does not end soon, or a second one comes.
    """

    def __init__(self, config: RunConfig) -> None:
        self.minutes = config.step_timeout_minutes
        self.limit_s = 60.0 * self.minutes
        self.folder = Path(config.folder)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.tick_s = min(TICK_S, self.limit_s / TICKS_PER_LIMIT) if self.limit_s else TICK_S
        self.heartbeat: Heartbeat | None = None
        self.num_steps, self.longest_step_s = 0, 0.0
        self._task, self._allowed_s, self._spent_s = "its start", 0.0, 0.0
        self._is_step = False
        self._signals: dict[int, float] = {}  # number -> seconds since it came first
        self._collective = ""
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        if self.limit_s and (store := open_store()) is not None:
            interval_s = min(HEARTBEAT_S, self.limit_s / TICKS_PER_LIMIT)
            self.heartbeat = Heartbeat(store, self.rank, self.num_ranks, interval_s, self._sign)
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        # written at once, also while the main thread is in C++ and its handlers wait
        self._previous_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        self._ended.set()
        with suppress(BlockingIOError):  # a full pipe wakes the thread too
            os.write(self._pipe[1], NO_SIGNAL)  # a run does not end with a tick of waiting
        self._thread.join()
        for end in self._pipe:
            os.close(end)
        if self.heartbeat is not None:
            self.heartbeat.leave()

    def begin_step(self, step: int) -> None:
        """Limit the time until the next call; the first step of a process may take longer."""
        if self._is_step:
            self.longest_step_s = max(self.longest_step_s, self._spent_s)
        self._begin(f"step {step}", PATIENCE if self.num_steps == 0 else 1, is_step=True)
        self.num_steps += 1

    def begin(self, task: str) -> None:
        """Limit the time of a task that takes longer than a step, until the next call."""
        self._begin(task, PATIENCE)

    @contextmanager
    def during(self, task: str) -> Iterator[None]:
        """Limit the time of a task within a step. The step then begins again."""
        outer = self._task, self._allowed_s, self._is_step
        self.begin(task)
        yield
        self._spent_s = 0.0
        self._task, self._allowed_s, self._is_step = outer

    def _begin(self, task: str, patience: int, is_step: bool = False) -> None:
        self._spent_s = 0.0  # first: the watching thread compares it with the next line's limit
        self._task, self._allowed_s, self._is_step = task, patience * self.limit_s, is_step

    def _sign(self) -> Sign:
        place, is_waiting = main_thread_place()
        return Sign(task=self._task, place=place, is_waiting=is_waiting or bool(self._collective))

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._ended.is_set():
            readable, _, _ = select.select([self._pipe[0]], [], [], self.tick_s)
            if readable:
                self._receive(os.read(self._pipe[0], 64))
            now = time.monotonic()
            ran_s, last = min(now - last, 2 * self.tick_s), now
            self._spent_s += ran_s
            self._signals = {number: age_s + ran_s for number, age_s in self._signals.items()}
            self._check()

    def _receive(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in STOP_SIGNALS:
                continue
            if number == signal.SIGINT and number in self._signals:
                time.sleep(INTERRUPT_S)
                if not self._ended.is_set():
                    self._end_by(number, "came twice")
            elif self._signals.get(number, 0.0) > REPEATED_SIGNAL_S:
                self._end_by(number, "came twice")
            self._signals.setdefault(number, 0.0)

    def _check(self) -> None:
        if self._allowed_s and self._spent_s > self._allowed_s:
            self._end_late()
        elif self.heartbeat is not None and self.heartbeat.silence_s > self.limit_s:
            self._end_late()
        elif self._signals and self._is_step:
            number, age_s = max(self._signals.items(), key=lambda item: item[1])
            if min(age_s, self._spent_s) > self._grace_s():
                self._end_by(number, f"came {age_s:.0f} seconds ago, and {self._task} has not ended")

    def _grace_s(self) -> float:
        grace_s = max(STOP_GRACE_S, 2 * self.longest_step_s)
        return min(grace_s, self.limit_s) if self.limit_s else grace_s

    def _end_by(self, number: int, what: str) -> None:
        name = signal.Signals(number).name
        message = f"rank {self.rank} ends without a save: {name} {what}"
        self._end(lambda: message, EXIT_BY_SIGNAL + number)

    def _end_late(self) -> None:
        self._end(self._describe_hang, EXIT_FAILED)

    def _describe_hang(self) -> str:
        with suppress(Exception):
            self._collective = pending_collective()
        limit = f"run.step_timeout_minutes = {self.minutes:g}"
        if self.heartbeat is not None and self.heartbeat.silence_s > self.limit_s:
            words = [f"rank {self.rank} ends in {self._task}: another rank was silent for {limit}"]
        else:
            times = f"{self._allowed_s / self.limit_s:.0f} times " if self._allowed_s > self.limit_s else ""
            words = [f"rank {self.rank} has not finished {self._task} within {times}{limit}"]
        words += self._describe_others()
        if self._collective:
            words.append(f"rank {self.rank} waits in {self._collective}")
        else:
            words.append(f"rank {self.rank} is at {main_thread_place()[0]}")
        if (file := self._write_stacks()) is not None:
            words.append(f"its stacks are in {file}")
        return "; ".join([*words, "start the run again to go on from its newest checkpoint"])

    def _describe_others(self) -> list[str]:
        """Name the ranks that are late: those that give no sign; else those in an earlier task or in no collective."""
        if self.heartbeat is None:
            return []
        try:
            others = list(self.heartbeat.others())
        except RuntimeError:
            return ["the store that the ranks share does not answer"]
        silent = [f"rank {rank} (last seen in {sign.task})" for rank, sign, runs in others if not runs]
        if silent:
            return [f"{', '.join(silent)} gives no sign: its process is stopped or its host is lost"]
        left = [f"rank {rank}" for rank, sign, _ in others if sign.has_left]
        if left:
            return [f"{', '.join(left)} has ended"]
        elsewhere = [pair for pair in others if pair[1].task != self._task]
        late = elsewhere or [pair for pair in others if not pair[1].is_waiting]
        return [f"rank {rank} is in {sign.task} at {sign.place}" for rank, sign, _ in late]

    def _write_stacks(self) -> Path | None:
        file = self.folder / "hangs" / f"rank-{self.rank}.txt"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("w") as out:
                print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self._task}; {self._collective}", file=out, flush=True)
                faulthandler.dump_traceback(out, all_threads=True)
        except OSError:
            return None
        return file

    def _end(self, describe: Any, exit_code: int) -> None:
        """Report in another thread, which may block, and end the process."""

        def report() -> None:
            message = describe()
            record_failure(message)
            complain(message)

        reporter = threading.Thread(target=report, name="hang report", daemon=True)
        reporter.start()
        interval_s = self.heartbeat.interval_s if self.heartbeat is not None else 0.0
        reporter.join(REPORT_S + 4 * interval_s)
        os._exit(exit_code)
