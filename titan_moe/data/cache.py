"""A cache on disk for tokenised data. Rank 0 builds while the others wait; a killed build never looks complete, and an
entry with damage is built again."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from titan_moe.data.checked_file import CHECKSUMS, CheckedFile, DamagedFileError

_FORMAT = 3  # increase it when the contents of an entry change
_ABANDONED_AFTER_SECONDS = 3600.0
_READ_AT_START_BYTES = 1 << 30
"""Files up to this size are compared with their checksums at the start, in about a second; larger ones block by block,
when a rank first reads from a block."""

Entry = TypeVar("Entry")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cache:
    """A folder of entries. Each entry is a folder named by a hash of its inputs. An entry is built under a temporary
    name and then renamed, so an entry is either complete or absent."""

    folder: Path
    is_builder: bool
    """Whether this rank builds missing entries. The other ranks read them after the barrier."""
    barrier: Callable[[], None]

    def get(self, name: str, key: object, build: Callable[[Path], None], open_: Callable[[Path], Entry]) -> Entry:
        """Open the entry of `key` (any JSON value). If it is missing or damaged, `build` fills a fresh folder for it.

        Raises: FileNotFoundError if the entry is missing after the barrier; ValueError if the folder cannot be created;
        the errors of `open_`.
        """
        digest = hashlib.sha256(json.dumps([_FORMAT, key], sort_keys=True).encode()).hexdigest()
        entry = self.folder / f"{name}-{digest[:16]}"
        try:
            if self.is_builder and not _is_whole(entry, open_):
                self._build(entry, build)
        finally:
            self.barrier()  # also after a failure, or the other ranks would wait for ever
        if not entry.exists():
            raise FileNotFoundError(
                f"data.cache_folder: {entry} is missing on this host; all ranks must share data.cache_folder. If the "
                "build failed, the error of rank 0 gives the reason"
            )
        return open_(entry)

    def _build(self, entry: Path, build: Callable[[Path], None]) -> None:
        # two containers may have equal process ids
        unfinished, damaged = (entry.with_name(f"{entry.name}.{uuid4().hex}.tmp") for _ in range(2))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished.mkdir()
        except OSError as error:
            problem = f"data.cache_folder: {error.filename} cannot be created: {error.strerror}; give a writable folder"
            raise ValueError(problem) from error
        for folder in self.folder.glob(f"{entry.name}.*.tmp"):
            with suppress(FileNotFoundError):  # another process has just finished this build
                last_write = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
                if time.time() - last_write > _ABANDONED_AFTER_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
        logger.info("building %s", entry)
        is_replaced = entry.exists()
        try:
            build(unfinished)
            if is_replaced:
                with suppress(FileNotFoundError):  # another run has just replaced it too
                    entry.rename(damaged)  # runs that have it open go on reading
            unfinished.rename(entry)
        except OSError:
            if not entry.exists():  # otherwise another run has built the same entry meanwhile
                raise
        finally:
            for folder in (unfinished, damaged):
                shutil.rmtree(folder, ignore_errors=True)


def _is_whole(entry: Path, open_: Callable[[Path], object]) -> bool:
    if not entry.exists():
        return False
    try:
        for checksums in entry.glob(f"*{CHECKSUMS}"):
            file = CheckedFile(checksums.with_suffix(""))
            if file.num_bytes <= _READ_AT_START_BYTES:
                file.read_all()
        open_(entry)
    except DamagedFileError as error:
        logger.warning("%s; it is built again", error.problem)
        return False
    return True


def describe_files(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """List path, size and modification time of files, for a cache key. File contents are not read."""
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
