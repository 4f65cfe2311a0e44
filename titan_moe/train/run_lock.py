"""One run at a time in a run folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_moe.config import RecipeError


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Keep a run folder for this run alone; a process that dies gives it up, however it dies.

    Two runs in one folder would write into each other's metrics and remove each other's unfinished checkpoints. On
    storage without locks of its own (some network file systems) nobody is kept out. A folder that was made for the
    claim and stays empty goes again: a refused recipe leaves nothing.

    Raises: RecipeError if the folder cannot be written or another run is in it.
    """
    was_there = folder.exists()
    with _open(folder) as handle:
        _lock(folder, handle)
        try:
            yield
        finally:
            if not was_there:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()


@contextmanager
def _open(folder: Path) -> Iterator[int]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(0, "no permission to write")
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        problem = f'run.folder = "{folder}" cannot be written: {error.strerror}; take a folder where you may write'
        raise RecipeError([problem]) from error
    try:
        yield handle
    finally:
        os.close(handle)  # the lock goes with it


def _lock(folder: Path, handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        problem = f'run.folder = "{folder}" is in use by another run; wait for its end, or take another run.folder'
        raise RecipeError([problem]) from error
    except OSError:
        pass  # this storage has no locks
