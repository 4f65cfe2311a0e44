"""The same records as curves in TensorBoard."""

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Write every number of a record under its name; members of a nested one as `name/member`.

    What an earlier run wrote of steps past `step` is no longer shown.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.writer = SummaryWriter(str(folder), max_queue=1000, purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Add a record's numbers at its step; what is no number (an unknown MFU, a switch) makes no curve."""
        for name, value in _curves(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Write what is still in memory."""
        self.writer.close()


def _curves(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    curves: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            curves |= _curves(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step":
            curves[prefix + name] = value
    return curves
