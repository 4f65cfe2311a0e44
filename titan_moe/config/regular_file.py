"""Open a file that another file names: only a regular one, because reading a pipe or a device may never end."""

import errno
import io
import os
import stat
from pathlib import Path

NOT_REGULAR = "it is no regular file"


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file to read its bytes. A link to one is followed.

    Raises: OSError, also for a folder, pipe, socket or device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for its writer
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    return open(descriptor, "rb")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Read a regular file that is small.

    Raises: OSError, also for a larger file, a folder, pipe, socket or device.
    """
    with open_regular(path) as file:
        contents = file.read(most_bytes + 1)
    if len(contents) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes / 2**20:g} MiB", str(path))
    return contents
