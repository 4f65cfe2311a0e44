"""TensorBoard output of the records."""

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Write every number of a record as a scalar. Members of nested records are named `name/member`. TensorBoard hides
    scalars that an interrupted run wrote for steps after `step`."""

    def __init__(self, folder: Path, step: int) -> None:
        self.writer = SummaryWriter(str(folder), max_queue=1000, purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Add the numbers of a record at its step. Other values (None, strings, booleans) are skipped."""
        for name, value in _scalars(record).items():
            self.writer.add_scalar(name, value, record["step"])

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
