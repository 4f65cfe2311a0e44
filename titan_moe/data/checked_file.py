"""Files with a checksum of each block beside them: damage is found by the read that meets it, and named by its block.

SHA-256 of a block takes a fraction of a millisecond, and the checksums of 100 GB have 13 MB. A block is compared when a
process first reads from it, so a run never reads more than it trains on, and starts at once. `tokens.bin` has its
checksums in `tokens.bin.sha256`: its size, a hash of each block, and a hash of these.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

BLOCK_BYTES = 1 << 18
CHECKSUMS = ".sha256"
DAMAGED = ".damaged"
"""Suffix of an empty file beside one in which a run has found damage. The next start does not need to read it all."""
_HASH_BYTES = 32
_SIZE_BYTES = 8


class DamagedFileError(ValueError):
    """A file is not as it was written."""

    def __init__(self, file: Path, problem: str) -> None:
        self.problem = f"{file} is damaged: {problem}"
        super().__init__(f"{self.problem}; start the run again, or remove {file.parent}: it is built again")


class CheckedWriter:
    """Write a file and, at the end, the checksums of its blocks beside it. Both are on the disk when it is closed.

    A context manager. After an error there are no checksums, so the file never counts as whole.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("wb")
        self._hashes: list[bytes] = []
        self._block, self._num_bytes = hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        rest = memoryview(data).cast("B")
        self._file.write(rest)
        while rest:
            free = BLOCK_BYTES - self._num_bytes % BLOCK_BYTES
            self._block.update(rest[:free])
            self._num_bytes += len(rest[:free])
            if self._num_bytes % BLOCK_BYTES == 0:
                self._end_block()
            rest = rest[free:]
        return len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        with self._file:
            if kind is None:
                _flush(self._file)
        if kind is not None:
            return
        if self._num_bytes % BLOCK_BYTES:
            self._end_block()
        contents = self._num_bytes.to_bytes(_SIZE_BYTES, "little") + b"".join(self._hashes)
        with Path(f"{self._path}{CHECKSUMS}").open("wb") as file:
            file.write(contents + hashlib.sha256(contents).digest())
            _flush(file)

    def _end_block(self) -> None:
        self._hashes.append(self._block.digest())
        self._block = hashlib.sha256()


class CheckedFile:
    """Read a file of `CheckedWriter`, and compare each block with its checksum when it is first read.

    It is read and not memory-mapped, as in token_file.py.

    Raises: DamagedFileError for a file of another size, without whole checksums, or with damage that was found earlier.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes, self._hashes = _read_checksums(path)
        if not path.exists():
            raise DamagedFileError(path, "it is missing")
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if (found := os.fstat(self._descriptor).st_size) != self.num_bytes:
            raise DamagedFileError(path, f"it has {found:,} bytes instead of {self.num_bytes:,}")
        if Path(f"{path}{DAMAGED}").exists():
            raise DamagedFileError(path, "a run has found a damaged block in it")
        self._is_compared = np.zeros(len(self._hashes) // _HASH_BYTES, dtype=bool)

    def read(self, start: int, stop: int) -> bytes:
        """Read bytes [start, stop).

        Raises: DamagedFileError for a block that is not as it was written.
        """
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        if self._is_compared[first:last].all():
            return self._pread(start, stop)
        blocks_start, blocks_stop = first * BLOCK_BYTES, min(last * BLOCK_BYTES, self.num_bytes)
        data = memoryview(self._pread(blocks_start, blocks_stop))
        for number in range(first, last):
            if not self._is_compared[number]:
                self._compare(number, data[(number - first) * BLOCK_BYTES : (number - first + 1) * BLOCK_BYTES])
        return bytes(data[start - blocks_start : stop - blocks_start])

    def read_all(self) -> None:
        """Compare every block, a block at a time."""
        for start in range(0, self.num_bytes, BLOCK_BYTES):
            self.read(start, min(start + BLOCK_BYTES, self.num_bytes))

    def _compare(self, number: int, block: memoryview) -> None:
        expected = self._hashes[number * _HASH_BYTES : (number + 1) * _HASH_BYTES]
        if hashlib.sha256(block).digest() != expected:
            start = number * BLOCK_BYTES
            place = f"block {number} of {len(self._is_compared)} (bytes {start:,} to {start + len(block):,})"
            raise self._damage(f"{place} is not as it was written, its sha256 differs")
        self._is_compared[number] = True

    def _pread(self, start: int, stop: int) -> bytes:
        pieces, read = [], start
        while read < stop and (piece := os.pread(self._descriptor, stop - read, read)):
            pieces.append(piece)
            read += len(piece)
        if read < stop:
            found = os.fstat(self._descriptor).st_size
            raise self._damage(f"it has become shorter, {found:,} bytes instead of {self.num_bytes:,}")
        return b"".join(pieces)

    def _damage(self, problem: str) -> DamagedFileError:
        with suppress(OSError):  # a folder that this run may not write
            Path(f"{self.path}{DAMAGED}").touch()
        return DamagedFileError(self.path, problem)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class CheckedTokenFile:
    """Token ids in a checked file, with the interface of `TokenFile`."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self.file = CheckedFile(path)

    def __len__(self) -> int:
        return self.file.num_bytes // self.dtype.itemsize

    def __getitem__(self, tokens: slice) -> np.ndarray:
        start, stop, _ = tokens.indices(len(self))
        size = self.dtype.itemsize
        return np.frombuffer(self.file.read(start * size, max(start, stop) * size), dtype=self.dtype)


def _read_checksums(path: Path) -> tuple[int, bytes]:
    """The size of a file and the hashes of its blocks."""
    try:
        sealed = Path(f"{path}{CHECKSUMS}").read_bytes()
    except FileNotFoundError as error:
        raise DamagedFileError(path, f"it has no {path.name}{CHECKSUMS}") from error
    contents, seal = sealed[:-_HASH_BYTES], sealed[-_HASH_BYTES:]
    num_bytes = int.from_bytes(contents[:_SIZE_BYTES], "little")
    num_blocks = -(-num_bytes // BLOCK_BYTES)
    is_whole = len(contents) == _SIZE_BYTES + num_blocks * _HASH_BYTES
    if not is_whole or hashlib.sha256(contents).digest() != seal:
        raise DamagedFileError(path, f"its {path.name}{CHECKSUMS} is not as it was written")
    return num_bytes, contents[_SIZE_BYTES:]


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
