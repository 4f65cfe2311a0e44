"""Open files of data, decompressed as they are read if their ending is `.gz` or `.zst`."""

import gzip
import io
import os
from pathlib import Path
from typing import IO, Any

PIECE_BYTES = 1 << 20


class OpenedFile:
    """A file to read from the front, and how much of what lies on the disk is read.

    Errors of reading are ValueErrors that name the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw: Any = path.open("rb")
        self._num_bytes = max(os.fstat(self._raw.fileno()).st_size, 1)
        self._data = _decompressed(self._raw, path)
        self.is_compressed = self._data is not self._raw

    @property
    def share(self) -> float:
        """How much of the file is read, from 0 to 1; of a compressed one some more than was returned."""
        return min(self._raw.tell() / self._num_bytes, 1.0)

    def readline(self) -> bytes:
        """Read a line with its end; empty at the end of the file."""
        return self._read(self._data.readline)

    def read(self, num_bytes: int = -1) -> bytes:
        """Read so many bytes, fewer only at the end; by default all that are left."""
        return self._read(self._data.read, num_bytes)

    def skip(self, num_bytes: int) -> None:
        """Go so many bytes on; those of a compressed file are read."""
        if not self.is_compressed:
            self._raw.seek(num_bytes, os.SEEK_CUR)
            return
        while num_bytes > 0 and (piece := self.read(min(num_bytes, PIECE_BYTES))):
            num_bytes -= len(piece)

    def close(self) -> None:
        self._data.close()
        self._raw.close()

    def _read(self, read: Any, *arguments: int) -> bytes:
        try:
            return read(*arguments)
        except Exception as error:  # each library has types of its own for other bytes and for an early end
            if not self.is_compressed:
                raise
            reason = str(error) or type(error).__name__
            raise ValueError(
                f"data.path: {self.path} cannot be decompressed: {reason}; it is damaged, or its ending is wrong"
            ) from error


def read_whole(path: Path) -> bytes:
    """Read a file, decompressed.

    Raises: ValueError for a compressed file that is damaged.
    """
    if path.suffix.lower() not in OPENERS:
        return path.read_bytes()
    file = OpenedFile(path)
    try:
        return file.read()
    finally:
        file.close()


def _decompressed(raw: IO[bytes], path: Path) -> Any:
    opener = OPENERS.get(path.suffix.lower())
    return raw if opener is None else opener(raw)


def _open_zst(raw: IO[bytes]) -> Any:
    """By Python's own library or by pyarrow, which both read several frames and find an early end."""
    try:
        from compression import zstd  # Python 3.14

        return zstd.ZstdFile(raw)
    except ImportError:
        pass
    try:
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd"), PIECE_BYTES)
    except ImportError as error:
        name = getattr(raw, "name", "a .zst file")
        way_out = "pip install pyarrow, take Python 3.14, or decompress it: zstd -d"
        raise ImportError(f"data.path: {name} needs a library for zstd; {way_out}") from error


OPENERS: dict[str, Any] = {".gz": lambda raw: gzip.GzipFile(fileobj=raw), ".zst": _open_zst}
"""Ending -> makes a stream of a file's bytes."""
