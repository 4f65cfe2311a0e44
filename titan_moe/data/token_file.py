"""A binary file of token ids, read piece by piece."""

import os
from pathlib import Path

import numpy as np


class TokenFile:
    """Read slices of a flat file of token ids, without holding it in memory.

    It is read and not memory-mapped: a file that becomes shorter while it is mapped ends the process with SIGBUS, and
    no message. The page cache serves both alike.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._num_tokens = os.fstat(self._descriptor).st_size // self.dtype.itemsize

    def __len__(self) -> int:
        """Number of tokens when it was opened."""
        return self._num_tokens

    def __getitem__(self, tokens: slice) -> np.ndarray:
        """Read tokens [start, stop).

        Raises: ValueError if the file has become shorter since it was opened.
        """
        start, stop, _ = tokens.indices(self._num_tokens)
        size = self.dtype.itemsize
        wanted = max(stop - start, 0) * size
        pieces, read = [], 0
        while read < wanted and (piece := os.pread(self._descriptor, wanted - read, start * size + read)):
            pieces.append(piece)
            read += len(piece)
        if read < wanted:
            found, expected = os.fstat(self._descriptor).st_size, self._num_tokens * size
            raise ValueError(
                f"data.path: {self.path} has become shorter while the run reads it: {found} bytes instead of "
                f"{expected}; restore the file and start the run again"
            )
        return np.frombuffer(b"".join(pieces), dtype=self.dtype)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)
