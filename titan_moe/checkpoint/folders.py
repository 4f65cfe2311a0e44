"""The checkpoint folders of a run: list complete ones, remove old and incomplete ones."""

import re
import shutil
from pathlib import Path

METADATA_FILE = ".metadata"
"""torch.distributed.checkpoint's description of the tensors. It gets its name last: a folder with it is complete."""


class CheckpointFolders:
    """The `step-N` folders of one run. Only rank 0 changes them.

    A checkpoint is complete if and only if its metadata file exists. A removal deletes this file first, so an
    interrupted removal leaves an incomplete folder, not a damaged checkpoint.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of a step. It may not exist yet."""
        return self.root / f"step-{step}"

    def complete_steps(self) -> list[int]:
        """The steps with complete checkpoints, oldest first."""
        return sorted(step for step in self._steps() if (self.path(step) / METADATA_FILE).is_file())

    def remove_incomplete(self) -> list[int]:
        """Delete the folders of interrupted saves and removals. No save may be pending."""
        incomplete = sorted(set(self._steps()) - set(self.complete_steps()))
        for step in incomplete:
            shutil.rmtree(self.path(step))
        return incomplete

    def keep_newest(self, num_kept: int) -> list[int]:
        """Delete all complete checkpoints but the newest. Incomplete folders are neither counted nor deleted."""
        removed = self.complete_steps()[:-num_kept]
        for step in removed:
            (self.path(step) / METADATA_FILE).unlink()
            shutil.rmtree(self.path(step))
        return removed

    def _steps(self) -> list[int]:
        if not self.root.is_dir():
            return []
        matches = (re.fullmatch(r"step-(\d+)", entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return [int(match.group(1)) for match in matches if match]
