"""Files with checksums: each block is compared when it is first read, and damage is named by file and block."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from titan_moe.data import checked_file
from titan_moe.data.checked_file import CheckedFile, CheckedTokenFile, CheckedWriter, DamagedFileError

BLOCK = 16
CONTENTS = bytes(range(100))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of 100 bytes in blocks of 16, written in unequal pieces."""
    monkeypatch.setattr(checked_file, "BLOCK_BYTES", BLOCK)
    with CheckedWriter(tmp_path / "numbers.bin") as file:
        for piece in (CONTENTS[:1], b"", CONTENTS[1:50], memoryview(CONTENTS)[50:]):
            file.write(piece)
    return tmp_path / "numbers.bin"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_checked_file_has_the_hash_of_each_block_beside_it(path: Path) -> None:
    assert path.read_bytes() == CONTENTS
    blocks = [hashlib.sha256(CONTENTS[start : start + BLOCK]).digest() for start in range(0, 100, BLOCK)]
    expected = (100).to_bytes(8, "little") + b"".join(blocks)
    assert Path(f"{path}.sha256").read_bytes() == expected + hashlib.sha256(expected).digest()


def test_checked_file_reads_every_range(path: Path) -> None:
    for start in range(0, 101, 3):
        file = CheckedFile(path)
        for stop in range(start, 101, 7):
            assert file.read(start, stop) == CONTENTS[start:stop]
    CheckedFile(path).read_all()
    tokens = CheckedTokenFile(path, np.dtype("<u2"))
    assert len(tokens) == 50 and np.array_equal(tokens[7:60], np.frombuffer(CONTENTS, "<u2")[7:])


@pytest.mark.parametrize("damage", [0, 33, 99])
def test_checked_file_names_the_damaged_block(path: Path, damage: int) -> None:
    flip(path, damage)
    file, number = CheckedFile(path), damage // BLOCK
    for start in range(0, 100, BLOCK):
        if start // BLOCK != number:
            assert file.read(start + 1, start + 3) == CONTENTS[start + 1 : start + 3]
    start, stop = number * BLOCK, min(100, (number + 1) * BLOCK)
    place = rf"block {number} of 7 \(bytes {start} to {stop}\) is not as it was written, its sha256 differs"
    way_out = f"start the run again, or remove {path.parent}: it is built again"
    with pytest.raises(DamagedFileError, match=f"{path} is damaged: {place}; {way_out}"):
        file.read(start, start + 1)
    with pytest.raises(DamagedFileError, match="a run has found a damaged block in it"):
        CheckedFile(path)


def test_checked_file_of_zeroed_blocks(path: Path) -> None:
    path.write_bytes(CONTENTS[:32] + bytes(32) + CONTENTS[64:])
    with pytest.raises(DamagedFileError, match="block 2 of 7"):
        CheckedFile(path).read_all()


def test_checked_file_that_becomes_shorter(path: Path) -> None:
    file = CheckedFile(path)
    with path.open("r+b") as stream:
        stream.truncate(40)
    assert file.read(10, 30) == CONTENTS[10:30]
    with pytest.raises(DamagedFileError, match="it has become shorter, 40 bytes instead of 100"):
        file.read(30, 60)


def test_checked_file_of_a_failed_write_does_not_open(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError), CheckedWriter(tmp_path / "a") as file:
        file.write(b"12")
        raise ArithmeticError
    with pytest.raises(DamagedFileError, match=r"a is damaged: it has no a.sha256"):
        CheckedFile(tmp_path / "a")
