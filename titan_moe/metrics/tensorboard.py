"""TensorBoard output of the records."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from titan_moe.metrics.sections import LOADS, charted

SHOWN_RESULTS = ("loss", "validation_loss")
"""Charts whose last values the list of runs shows beside their settings."""


class TensorBoard:
    """Write every number of a record as a chart. TensorBoard hides those that an interrupted run wrote for steps after
    `step`."""

    def __init__(self, folder: Path, step: int, settings: Mapping[str, str | float]) -> None:
        """`settings` tell a run apart in the list of runs (HParams)."""
        self.writer = SummaryWriter(str(folder), max_queue=1000, purge_step=step + 1)
        experiment, start, _ = hparams(dict(settings), dict.fromkeys(SHOWN_RESULTS))
        for summary in (experiment, start):
            self.writer.file_writer.add_summary(summary)

    def write(self, record: dict[str, Any]) -> None:
        """Add the numbers of a record at its step."""
        for chart, value in charted(record).items():
            self.writer.add_scalar(chart, value, record["step"])

    def write_loads(self, image_HW: np.ndarray, step: int) -> None:
        """Add the image of the loads of experts: uint8 [H, W], gray."""
        self.writer.add_image(LOADS, image_HW, step, dataformats="HW")

    def close(self) -> None:
        """Flush and close the file."""
        self.writer.close()
