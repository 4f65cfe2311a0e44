"""Open a file that another file names: only a regular one, because reading a pipe or a device may never end."""

import errno
import io
import os
import stat

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
