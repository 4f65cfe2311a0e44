"""Files that are neither text nor token ids are recognised by their first bytes."""

import bz2
import gzip
import io
import lzma
import sys
import zipfile

import numpy as np
import pytest

from titan_moe.data.file_kinds import kind_of


def zipped() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.txt", "text")
    return stream.getvalue()


def saved_by_numpy() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.arange(9))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (gzip.compress(b"text" * 9999), "gzip"),
        (bz2.compress(b"text"), "bzip2"),
        (lzma.compress(b"text"), "xz"),
        (zipped(), "zip"),
        (saved_by_numpy(), "NumPy"),
        (open(sys.executable, "rb").read(64), "ELF"),
    ],
)
def test_kinds_as_their_programs_write_them(data: bytes, name: str) -> None:
    for is_text in (True, False):
        kind = kind_of(data[:4096], is_text=is_text)
        assert kind is not None and name in kind.name


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32", "utf-16-be"])
def test_marks_of_encodings_are_those_of_text(encoding: str) -> None:
    data = "\ufefftext".encode(encoding) if encoding.islower() else "text".encode(encoding)
    assert kind_of(data, is_text=False) is None, "an id of 16 bits may be 0xfeff"
    kind = kind_of(data, is_text=True)
    assert kind is not None and encoding.upper()[:6] in kind.name


def test_text_and_ids_have_no_kind() -> None:
    assert kind_of("BZh and PARIS in naïve text".encode(), is_text=True) is None
    assert kind_of(b"", is_text=True) is None
    assert kind_of(np.array([35615, 8, 9, 10] * 99, "<u2").tobytes(), is_text=False) is None, "begins as gzip does"
