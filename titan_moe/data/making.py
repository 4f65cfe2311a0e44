"""Let one process make a folder while others wait for it; a maker that is killed leaves its place to the next one."""

import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

LOCK_FILE = ".lock"
_POLL_SECONDS = 0.2
_SAID_EVERY_SECONDS = 60.0
_ABANDONED_AFTER_SECONDS = 3600.0
"""Where storage has no locks, a folder to which nothing was written for so long has no maker."""

logger = logging.getLogger(__name__)


@contextmanager
def claimed(folder: Path) -> Iterator[Path | None]:
    """Claim the making of `folder`: an empty folder beside it to work in, or None after another process has ended
    making it, or has failed. The caller renames the work folder; LOCK_FILE in it may go only then. What is left of the
    work folder at the end is removed.

    The lock is the operating system's on a file in the work folder, so a killed process releases it. On storage without
    locks several processes work at the same time, each in a folder of its own.
    """
    work = folder.with_name(f"{folder.name}.tmp")
    handle = _lock(work)
    if handle is None:
        work = folder.with_name(f"{folder.name}.{uuid4().hex}.tmp")  # two containers may have equal process ids
        work.mkdir()
    try:
        if handle is not None and not _is_at(handle, work / LOCK_FILE):
            yield None
            return
        _remove_abandoned(folder)
        for path in work.iterdir():
            if path.name != LOCK_FILE:
                _remove(path)
        yield work
    finally:
        if handle is None or _is_at(handle, work / LOCK_FILE):
            shutil.rmtree(work, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _lock(work: Path) -> int | None:
    """Wait for the lock of a work folder, and make the folder. None where the storage has no locks."""
    handle = None
    while handle is None:
        work.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # it has just been renamed
            handle = os.open(work / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    said_at = None
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(handle)
                with suppress(OSError):  # another process without locks has done so
                    (work / LOCK_FILE).unlink()
                    work.rmdir()
                return None
        if said_at is None or time.monotonic() - said_at > _SAID_EVERY_SECONDS:
            logger.info("waiting for another process, which makes %s", work.with_suffix(""))
            said_at = time.monotonic()
        time.sleep(_POLL_SECONDS)


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file is still the one of this path."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _remove_abandoned(folder: Path) -> None:
    """Remove work folders of earlier makers on storage without locks."""
    for work in folder.parent.glob(f"{folder.name}.*.tmp"):
        with suppress(FileNotFoundError):  # another process has just finished
            last_write = max(path.stat().st_mtime for path in [work, *work.iterdir()])
            if time.time() - last_write > _ABANDONED_AFTER_SECONDS:
                shutil.rmtree(work, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
