"""Which checkpoints of a run are whole, and how old and broken ones leave without harming them."""

import re
import shutil
from pathlib import Path

MARK = ".metadata"  # written last by torch.distributed.checkpoint: a folder that has it is complete


class CheckpointFolders:
    """The `step-N` folders of one run. Only the main rank changes them.

    A checkpoint is complete exactly while it has its mark. Removing one takes the mark away first, so that a process
    that dies half-way leaves a folder that nobody takes for a checkpoint.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies or will lie."""
        return self.root / f"step-{step}"

    def complete_steps(self) -> list[int]:
        """The steps whose checkpoints can be loaded, oldest first."""
        return sorted(step for step in self._steps() if (self.path(step) / MARK).is_file())

    def remove_incomplete(self) -> list[int]:
        """Delete what interrupted saves and removals have left; call it only while no save is under way."""
        incomplete = sorted(set(self._steps()) - set(self.complete_steps()))
        for step in incomplete:
            shutil.rmtree(self.path(step))
        return incomplete

    def keep_newest(self, num_kept: int) -> list[int]:
        """Delete all complete checkpoints but the newest; a folder that is being written counts for nothing here."""
        removed = self.complete_steps()[:-num_kept]
        for step in removed:
            (self.path(step) / MARK).unlink()
            shutil.rmtree(self.path(step))
        return removed

    def _steps(self) -> list[int]:
        if not self.root.is_dir():
            return []
        matches = (re.fullmatch(r"step-(\d+)", entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return [int(match.group(1)) for match in matches if match]
