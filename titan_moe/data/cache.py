"""A cache on disk for tokenised data. Rank 0 builds while the others wait; a killed build never looks complete."""

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

_FORMAT = 2  # increase it when the contents of an entry change
_ABANDONED_AFTER_SECONDS = 3600.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cache:
    """A folder of entries. Each entry is a folder named by a hash of its inputs. An entry is built under a temporary
    name and then renamed, so an entry is either complete or absent."""

    folder: Path
    is_builder: bool
    """Whether this rank builds missing entries. The other ranks read them after the barrier."""
    barrier: Callable[[], None]

    def get(self, name: str, key: object, build: Callable[[Path], None]) -> Path:
        """Return the entry of `key` (any JSON value). If it is missing, `build` fills a fresh folder for it.

        Raises: FileNotFoundError if the entry is missing after the barrier; ValueError if the folder cannot be created.
        """
        digest = hashlib.sha256(json.dumps([_FORMAT, key], sort_keys=True).encode()).hexdigest()
        entry = self.folder / f"{name}-{digest[:16]}"
        try:
            if self.is_builder and not entry.exists():
                self._build(entry, build)
        finally:
            self.barrier()  # also after a failure, or the other ranks would wait for ever
        if not entry.exists():
            raise FileNotFoundError(
                f"data.cache_folder: {entry} is missing on this host; all ranks must share data.cache_folder. If the "
                "build failed, the error of rank 0 gives the reason"
            )
        return entry

    def _build(self, entry: Path, build: Callable[[Path], None]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"data.cache_folder: {self.folder} cannot be created: {error.strerror}; give a writable folder"
            raise ValueError(problem) from error
        for folder in self.folder.glob(f"{entry.name}.*.tmp"):
            with suppress(FileNotFoundError):  # another process has just finished this build
                last_write = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
                if time.time() - last_write > _ABANDONED_AFTER_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
        unfinished = entry.with_name(f"{entry.name}.{uuid4().hex}.tmp")  # two containers may have equal process ids
        unfinished.mkdir()
        logger.info("building %s", entry)
        try:
            build(unfinished)
            unfinished.rename(entry)
        except OSError:
            if not entry.exists():  # otherwise another run has built the same entry meanwhile
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def describe_files(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """List path, size and modification time of files, for a cache key. File contents are not read."""
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
