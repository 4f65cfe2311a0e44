"""Write a Chrome trace of a few optimizer steps, for chrome://tracing or Perfetto."""

import logging
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from titan_moe.config.train import ProfileConfig

logger = logging.getLogger(__name__)


def trace_path(run_folder: Path, first_step: int, rank: int) -> Path:
    """The file of a rank's trace that begins with a step."""
    return run_folder / "traces" / f"step-{first_step}-rank-{rank}.json"


def new_profile(path: Path, num_steps: int, *, num_waits: int = 0) -> profile:
    """A profiler that waits for `num_waits` steps, warms up for one, traces `num_steps` and writes them to `path`."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)

    def write(finished: profile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(path))
        logger.info("the trace is %s, one file a rank; view it at https://ui.perfetto.dev", path)

    steps = schedule(wait=num_waits, warmup=1, active=num_steps, repeat=1)
    return profile(activities=activities, profile_memory=True, schedule=steps, on_trace_ready=write)


class Tracer(Protocol):
    """What traces the steps of a run."""

    is_done: bool
    """Whether the run may end."""

    def start(self, runner: Any, first_step: int) -> None:
        """Call before the first step of this process; `runner` takes the steps."""

    def step(self) -> None:
        """Call after each optimizer step."""

    def close(self) -> None:
        """Stop. If the run ends during the traced steps, the steps so far are written."""


class StepTracer:
    """Profile steps `start_step .. start_step + num_steps - 1` of a run and write one file per rank."""

    is_done = False  # the run goes on after its trace

    def __init__(self, config: ProfileConfig, run_folder: Path, rank: int) -> None:
        self._config, self._path = config, trace_path(run_folder, config.start_step, rank)
        self._profile: profile | None = None

    def start(self, runner: Any, first_step: int) -> None:
        """Call before the first step of this process. A run resumed after `start_step` traces nothing."""
        wait = self._config.start_step - first_step
        if self._config.start_step == 0 or wait < 0:
            return
        self._profile = new_profile(self._path, self._config.num_steps, num_waits=wait)
        self._profile.start()
        self._profile.step()  # its step 0 is before the first step: a trace from that one on has an empty warm-up

    def step(self) -> None:
        """Call after each optimizer step."""
        if self._profile is not None:
            self._profile.step()

    def close(self) -> None:
        """Stop. If the run ends during the traced steps, the steps so far are written."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
