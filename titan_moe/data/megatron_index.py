"""Read the index (.idx) of a token file of Megatron: the dtype of its ids, and where its documents end.

Its parts: the magic, version 1 (uint64), a code of the dtype (uint8), the numbers of sequences S and of document
borders D (uint64); then the tokens of each sequence (int32 [S]), the byte at which each begins (int64 [S]), and the
sequence at which each document begins (int64 [D], from 0; the last one is S). Multimodal data has more, which is not
read. All numbers are little-endian.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

MAGIC = b"MMIDIDX\0\0"
_VERSION = 1
_HEADER = np.dtype([("magic", "S9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("borders", "<u8")])
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class MegatronIndex(NamedTuple):
    """What an index says of its token file. Its lists, one entry a sequence, are read only for `document_ends`."""

    path: Path
    dtype: np.dtype
    num_sequences: int
    num_borders: int

    def num_bytes(self) -> int:
        """Bytes of the token file, by its last sequence."""
        if self.num_sequences == 0:
            return 0
        last = self.num_sequences - 1
        (length,) = self._read("<i4", 1, 4 * last)
        (start,) = self._read("<i8", 1, 4 * self.num_sequences + 8 * last)
        return int(start) + int(length) * self.dtype.itemsize

    def document_ends(self) -> np.ndarray:
        """The token after the last one of each document, without empty documents. Sequences after the last border are
        one document.

        Raises: ValueError for sequences or borders that are not in order.
        """
        lengths, starts = (
            self._read("<i4", self.num_sequences, 0),
            self._read("<i8", self.num_sequences, 4 * self.num_sequences),
        )
        token_ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
        if not np.array_equal(starts, token_ends[:-1] * self.dtype.itemsize):
            raise _refuse(self.path, "lists sequences that do not lie one after the other")
        borders = self._read("<i8", self.num_borders, 12 * self.num_sequences)
        borders = np.append(borders, self.num_sequences)
        if borders[0] < 0 or (np.diff(borders) < 0).any():
            raise _refuse(self.path, "lists documents that are not in order")
        ends = np.unique(token_ends[borders])
        return ends[ends > 0]

    def _read(self, dtype: str, count: int, offset_bytes: int) -> np.ndarray:
        return np.fromfile(self.path, dtype, count, offset=_HEADER.itemsize + offset_bytes)


def is_index(file: Path) -> bool:
    """Whether a file begins as an index."""
    with file.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def read_index(file: Path) -> MegatronIndex:
    """Read the header of an index.

    Raises: ValueError if it is of another version or dtype, or shorter than its lists.
    """
    header = np.fromfile(file, _HEADER, 1)
    if len(header) == 0 or header[0]["version"] != _VERSION:
        raise _refuse(file, f"is not of version {_VERSION}")
    code, num_sequences, num_borders = (int(header[0][name]) for name in ("dtype", "sequences", "borders"))
    if code not in _DTYPES:
        raise _refuse(file, f"gives the tokens a dtype with the code {code}, which is none of integers")
    expected, found = _HEADER.itemsize + 12 * num_sequences + 8 * num_borders, file.stat().st_size
    if found < expected:
        raise _refuse(file, f"has {found:,} bytes, and {num_sequences:,} sequences need {expected:,}")
    return MegatronIndex(file, np.dtype(_DTYPES[code]).newbyteorder("<"), num_sequences, num_borders)


def _refuse(file: Path, problem: str) -> ValueError:
    return ValueError(
        f"data.path: Megatron's index {file} {problem}; write it again, or move it away: its .bin is then read as "
        "ids of data.token_dtype"
    )
