"""The checkpoint folders of a run: list complete ones, remove old and incomplete ones."""

import logging
import re
import shutil
from collections.abc import Collection
from pathlib import Path

logger = logging.getLogger(__name__)

METADATA_FILE = ".metadata"
"""torch.distributed.checkpoint's description of the tensors. It gets its name last: a folder with it is complete."""

SOURCE_FOLDER = "hf_source"
"""Folder of a run with config.json, tokenizer and generation files of the checkpoint that it has begun with."""


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
        """Delete the folders of interrupted saves and removals, and return their steps. No save may be pending."""
        incomplete = sorted(set(self._steps()) - set(self.complete_steps()))
        return [step for step in incomplete if self._remove(step)]

    def keep_newest(self, num_kept: int, last_update: int | None = None, others: Collection[int] = ()) -> list[int]:
        """Delete all complete checkpoints but the newest and those of `others`. Incomplete folders are neither counted
        nor deleted. Returns the steps of those that it has deleted.

        Those of steps after `last_update`, the last step that has changed the weights, are counted for themselves, and
        displace no other: the run may have diverged.
        """
        steps = self.complete_steps()
        since = [step for step in steps if last_update is not None and step > last_update]
        before = steps[: len(steps) - len(since)]
        old = [step for alike in (before, since) for step in alike[:-num_kept] if step not in others]
        return [step for step in old if self._remove(step)]

    def _remove(self, step: int) -> bool:
        """Delete a checkpoint, of a link the link alone. One that the storage keeps is told and left: a run must not
        end because of it. On network file systems a folder stays while another process reads its files."""
        folder = self.path(step)
        try:
            if folder.is_symlink():
                folder.unlink()
            else:
                (folder / METADATA_FILE).unlink(missing_ok=True)
                shutil.rmtree(folder)
        except OSError as error:
            logger.warning("%s cannot be removed (%s); it is tried again after the next save", folder, error)
            return False
        return True

    def _steps(self) -> list[int]:
        if not self.root.is_dir():
            return []
        matches = (re.fullmatch(r"step-(0|[1-9][0-9]*)", entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return [int(match.group(1)) for match in matches if match]
