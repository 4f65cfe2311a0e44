"""A binary file of token ids, read piece by piece, and the bounded number of files that are open for it."""

import errno
import os
import resource
from collections import OrderedDict
from pathlib import Path
from threading import Lock

import numpy as np

_MAX_OPEN_FILES = 128


class OpenFiles:
    """Keep the files that were read last open, and close the others: a corpus may have more files than a process may
    open. Threads may read at the same time."""

    def __init__(self) -> None:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._limit = _MAX_OPEN_FILES if allowed < 0 else max(1, min(_MAX_OPEN_FILES, allowed // 4))
        self._descriptors: OrderedDict[Path, int] = OrderedDict()
        self._first_opened: dict[Path, os.stat_result] = {}
        self._lock = Lock()  # a descriptor that is closed while it is read may be that of another file

    def read(self, path: Path, num_bytes: int, offset_bytes: int) -> bytes:
        """Read a piece of a file; fewer bytes if the file ends before.

        Raises: ValueError for a file that cannot be opened, or that another one has replaced since it was first opened.
        """
        pieces, num_read = [], 0
        with self._lock:
            descriptor = self._open(path)
            while num_read < num_bytes and (
                piece := os.pread(descriptor, num_bytes - num_read, offset_bytes + num_read)
            ):
                pieces.append(piece)
                num_read += len(piece)
        return b"".join(pieces)

    def _open(self, path: Path) -> int:
        if path in self._descriptors:
            self._descriptors.move_to_end(path)
            return self._descriptors[path]
        while len(self._descriptors) >= self._limit:
            os.close(self._descriptors.popitem(last=False)[1])
        try:
            descriptor = self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.EMFILE and self._descriptors:  # others have many open
                self._limit = max(len(self._descriptors) // 2, 1)
                return self._open(path)
            problem = f"data.path: {path} cannot be opened while the run reads it: {error.strerror}"
            raise ValueError(f"{problem}; restore the file and start the run again") from error
        now = os.fstat(descriptor)
        before = self._first_opened.setdefault(path, now)
        is_same = (now.st_ino, now.st_dev) == (before.st_ino, before.st_dev)
        if not is_same and (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise ValueError(
                f"data.path: {path} has been replaced while the run reads it; restore the file and start the run again"
            )
        return descriptor

    def __del__(self) -> None:
        for descriptor in getattr(self, "_descriptors", {}).values():
            os.close(descriptor)


class TokenFile:
    """Read slices of a file of token ids, without holding it in memory.

    It is read and not memory-mapped: a file that becomes shorter while it is mapped ends the process with SIGBUS, and
    no message. The page cache serves both alike.
    """

    def __init__(
        self,
        path: Path,
        dtype: np.dtype,
        offset_bytes: int = 0,
        num_tokens: int | None = None,
        open_files: OpenFiles | None = None,
    ) -> None:
        """`offset_bytes` is where the ids begin. By default they end with the file."""
        self.path, self.dtype, self._offset_bytes = path, np.dtype(dtype), offset_bytes
        if num_tokens is None:
            num_tokens = (path.stat().st_size - offset_bytes) // self.dtype.itemsize
        self._num_tokens = num_tokens
        self._open_files = open_files or OpenFiles()

    def __len__(self) -> int:
        """Number of tokens when it was opened."""
        return self._num_tokens

    def __getitem__(self, tokens: slice) -> np.ndarray:
        """Read tokens [start, stop).

        Raises: ValueError if the file has become shorter since it was opened, or is gone.
        """
        start, stop, _ = tokens.indices(self._num_tokens)
        size = self.dtype.itemsize
        wanted = max(stop - start, 0) * size
        data = self._open_files.read(self.path, wanted, self._offset_bytes + start * size)
        if len(data) < wanted:
            found, expected = self.path.stat().st_size, self._offset_bytes + self._num_tokens * size
            raise ValueError(
                f"data.path: {self.path} has become shorter while the run reads it: {found} bytes instead of "
                f"{expected}; restore the file and start the run again"
            )
        return np.frombuffer(data, dtype=self.dtype)
