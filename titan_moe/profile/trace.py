"""Write a Chrome trace of a few optimizer steps, for chrome://tracing or Perfetto."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from titan_moe.config.train import ProfileConfig

logger = logging.getLogger(__name__)


def trace_path(config: ProfileConfig, run_folder: Path, rank: int) -> Path:
    """The file of a rank's trace."""
    return run_folder / "traces" / f"step-{config.start_step}-rank-{rank}.json"


class StepTracer:
    """Profile steps `start_step .. start_step + num_steps - 1` of a run and write one file per rank."""

    def __init__(self, config: ProfileConfig, run_folder: Path, rank: int, first_step: int) -> None:
        """`first_step` is the first step of this process. A run resumed after `start_step` traces nothing."""
        self._profile: profile | None = None
        wait = config.start_step - first_step
        if config.start_step == 0 or wait < 0:
            return
        self._path = trace_path(config, run_folder, rank)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            profile_memory=True,
            schedule=schedule(wait=wait, warmup=1, active=config.num_steps, repeat=1),
            on_trace_ready=self._write,
        )
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

    def _write(self, finished: profile) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._path))
        logger.info("the trace is %s, one file a rank; view it at https://ui.perfetto.dev", self._path)
