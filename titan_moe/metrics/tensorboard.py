"""The same records as curves in TensorBoard."""

from pathlib import Path
from typing import Any

from titan_moe.titan import TensorBoardLogger


class TensorBoard:
    """Write every number of a record under its name; members of a nested one as `name/member`."""

    def __init__(self, folder: Path) -> None:
        self.logger = TensorBoardLogger(str(folder))

    def write(self, record: dict[str, Any]) -> None:
        """Add a record's numbers at its step; what is no number (an unknown MFU, a switch) makes no curve."""
        self.logger.log(_curves(record), record["step"])

    def close(self) -> None:
        """Write what is still in memory."""
        self.logger.close()


def _curves(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    curves: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            curves |= _curves(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step":
            curves[prefix + name] = value
    return curves
