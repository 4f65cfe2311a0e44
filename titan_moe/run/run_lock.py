"""A lock on the run folder: one run at a time."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_moe.config import RecipeError

HOLDER_FILE = "running"
"""In the run folder, while a run uses it: host and process id of rank 0. A killed run leaves it, without the lock."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Lock a run folder. The operating system releases the lock when the process ends, also after a crash.

    Two runs in one folder would mix their metrics and remove each other's unfinished checkpoints. On storage without
    locks (some network file systems) the lock has no effect. A folder that is created for the lock and stays empty is
    removed, so a refused recipe leaves no folder.

    Raises: RecipeError if the folder is not writable or another run uses it, with the host and process of that run.
    """
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(0, "no permission to write")
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        problem = f'run.folder = "{folder}" cannot be written: {error.strerror}; set a writable folder'
        raise RecipeError([problem]) from error
    try:
        with suppress(OSError):  # the storage does not support locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                way_out = "wait for its end, or set another run.folder"
                holder = _holder(folder)
                raise RecipeError([f'run.folder = "{folder}" is in use by another run{holder}; {way_out}']) from error
        with suppress(OSError):  # a full disk
            (folder / HOLDER_FILE).write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        try:
            yield
        finally:
            (folder / HOLDER_FILE).unlink(missing_ok=True)
            if not existed:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
    finally:
        os.close(handle)  # releases the lock


def _holder(folder: Path) -> str:
    """Name the run that has the lock, in brackets."""
    try:
        return f" ({(folder / HOLDER_FILE).read_text().strip()})"
    except OSError:
        return ""
