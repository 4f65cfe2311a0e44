"""Work done once and kept on disk: rank 0 builds, the others wait, and a killed build never looks finished."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

_FORMAT = 1  # raise it when what a build writes changes
_ABANDONED_AFTER_SECONDS = 3600.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cache:
    """A folder of entries, each a folder whose name says what it was made from.

    An entry is built under a temporary name and renamed as a whole, so it is there completely or not at all.
    """

    folder: Path
    is_builder: bool
    """Whether this rank builds what is missing; the others find it after the barrier."""
    barrier: Callable[[], None]

    def get(self, name: str, key: object, build: Callable[[Path], None]) -> Path:
        """Find the entry made from `key` (anything JSON can say), or let `build` fill a fresh folder for it."""
        digest = hashlib.sha256(json.dumps([_FORMAT, key], sort_keys=True).encode()).hexdigest()
        entry = self.folder / f"{name}-{digest[:16]}"
        try:
            if self.is_builder and not entry.exists():
                self._build(entry, build)
        finally:
            self.barrier()  # also after a failure: the others must not wait for ever
        if not entry.exists():
            raise FileNotFoundError(
                f"data.cache_folder: {entry} was not built, or this machine does not see it; all ranks must share "
                "data.cache_folder, and rank 0 says what went wrong where the build failed"
            )
        return entry

    def _build(self, entry: Path, build: Callable[[Path], None]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"data.cache_folder: {self.folder} cannot be made: {error.strerror}; name a folder where you may write"
            ) from error
        _remove_abandoned(self.folder.glob(f"{entry.name}.*.tmp"))
        unfinished = entry.with_name(f"{entry.name}.{uuid4().hex}.tmp")  # process ids are alike in two containers
        unfinished.mkdir()
        logger.info("building %s", entry)
        try:
            build(unfinished)
            unfinished.rename(entry)
        except OSError:
            if not entry.exists():  # otherwise another run was faster with the same entry
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def describe_files(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Describe files as a cache key does: path, size and time of the last change; their bytes are not read."""
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _remove_abandoned(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(FileNotFoundError):  # whoever builds it has just finished
            last_write = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
            if time.time() - last_write > _ABANDONED_AFTER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
