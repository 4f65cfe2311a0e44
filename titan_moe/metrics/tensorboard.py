"""TensorBoard output of the records."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

WHITE_LOAD = 4.0
"""Load of a white cell. Black is an idle expert, a quarter of white is balanced."""
CELL_PIXELS = 8


class TensorBoard:
    """Write every number of a record as a scalar. Members of nested records are named `name/member`. TensorBoard hides
    scalars that an interrupted run wrote for steps after `step`."""

    def __init__(self, folder: Path, step: int) -> None:
        self.writer = SummaryWriter(str(folder), max_queue=1000, purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Add the numbers of a record at its step. Other values (None, strings, booleans) are skipped."""
        for name, value in _scalars(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def write_loads(self, loads_LE: Tensor, step: int) -> None:
        """Add the loads of experts as an image: a row for each layer, a column for each expert."""
        gray_HW = (loads_LE.clamp(max=WHITE_LOAD) * (255 / WHITE_LOAD)).round().to(torch.uint8)
        for dim in (0, 1):
            gray_HW = gray_HW.repeat_interleave(CELL_PIXELS, dim)
        self.writer.add_image("expert_load", gray_HW, step, dataformats="HW")

    def close(self) -> None:
        """Flush and close the file."""
        self.writer.close()


def _scalars(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    scalars: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            scalars |= _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step":
            scalars[prefix + name] = value
    return scalars
