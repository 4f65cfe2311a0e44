"""The steps that `titan-moe trace` times and traces: steady ones, taken as the run takes them."""

import time
from collections.abc import Generator
from pathlib import Path

import torch

from titan_moe.config.train import ProfileConfig
from titan_moe.profile.trace import new_profile, trace_path
from titan_moe.training.step_runner import StepRunner

FIRST_STEADY_STEP = 4
"""The steps before it compile, autotune and allocate."""
NUM_ALIKE = 3
"""Steps in a row that are taken alike before a run is steady."""
MAX_WAIT_STEPS = 64
"""A run that is not steady by then is traced as it is."""
NUM_TIMED_STEPS = 10


class SteadyTracer:
    """Wait until the steps of a run are steady, time some, and trace `num_steps` of them. Then the run may end.

    Steps are steady once they are taken as all later ones: replayed, if the recipe has a CUDA graph, and with a
    capacity bound, if it has one. With `start_step` the traced steps begin there, steady or not. A replayed step has no
    host events that name its kernels, so the trace ends with one that is launched, whose kernels are the same.
    """

    def __init__(self, config: ProfileConfig, run_folder: Path, rank: int, last_step: int) -> None:
        """`last_step` is the last step of the run."""
        self.config, self.run_folder, self.rank, self.last_step = config, run_folder, rank, last_step
        self.is_done = False
        self.step_ms: float | None = None
        """Mean time of the timed steps, without the profiler; None if there was no step to time."""
        self.num_timed = 0
        self.first_step = 0
        """The first traced step; 0 before there is one."""
        self.kind = ""
        """How the last traced step was taken: `launched` or `replayed`."""
        self.is_steady = False
        """Whether the traced steps were steady."""

    def start(self, runner: StepRunner, first_step: int) -> None:
        self.runner, self.num_steps = runner, first_step - 1  # so far
        self.plan = self._plan()
        next(self.plan)

    def step(self) -> None:
        self.num_steps += 1
        self.is_done = next(self.plan, self) is self

    def close(self) -> None:
        self.plan.close()

    def _plan(self) -> Generator[None]:
        """What happens before each step and after the last one."""
        yield from self._wait()
        while not (yield from self._time()):
            yield from self._wait()
        has_warm_up = self.config.start_step != self.num_steps + 1
        self.first_step = self.num_steps + 1 + has_warm_up
        path = trace_path(self.run_folder, self.first_step, self.rank)
        has_graph = self.runner.captured is not None
        with new_profile(path, self.config.num_steps + has_graph) as profiler:
            if has_warm_up:
                yield
            profiler.step()
            for _ in range(self.config.num_steps):
                yield
                profiler.step()
                self.kind, self.is_steady = self.runner.kind, self.runner.is_steady
            if has_graph:
                self.runner.launch_next()
                yield
                profiler.step()

    def _wait(self) -> Generator[None]:
        """Until the steps are steady, or there are just enough left."""
        if self.config.start_step:
            while self.num_steps < self.config.start_step - 2 - NUM_TIMED_STEPS:
                yield
            return
        num_alike, manner = 0, None
        while num_alike < NUM_ALIKE and self.num_steps < min(MAX_WAIT_STEPS, self.last_step - self._num_needed):
            yield
            is_alike = self.runner.is_steady and self.runner.manner == manner and self.num_steps >= FIRST_STEADY_STEP
            num_alike, manner = num_alike + 1 if is_alike else 0, self.runner.manner

    def _time(self) -> Generator[None, None, bool]:
        """Time the steps that are left before the trace. Returns whether it may begin: they were alike, or it must."""
        end = self.config.start_step - 2 if self.config.start_step else self.last_step - self._num_needed
        num_steps, manner = max(min(NUM_TIMED_STEPS, end - self.num_steps), 0), self.runner.manner
        began = self._now()
        for _ in range(num_steps):
            yield
            if self.runner.manner != manner and not self.config.start_step and self.num_steps < MAX_WAIT_STEPS:
                return False
        if num_steps:
            self.num_timed, self.step_ms = num_steps, (self._now() - began) * 1e3 / num_steps
        return True

    @property
    def _num_needed(self) -> int:
        """Steps of the trace: the profiler's warm-up, the traced ones, and one that is launched."""
        return 1 + self.config.num_steps + (self.runner.captured is not None)

    def _now(self) -> float:
        """Seconds, after all work of the device."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()
