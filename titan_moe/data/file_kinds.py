"""Recognise files that are neither text nor token ids by their first bytes, and say what to do with them."""

import zlib
from pathlib import Path
from typing import NamedTuple

HEAD_BYTES = 4096
_FEW_ZEROS = 8


class FileKind(NamedTuple):
    """A kind of file, in words, and what makes a text of it."""

    name: str
    way_out: str
    is_compressed: bool = False
    """Whether `datasets` decompresses it."""


def _compressed(by: str, command: str) -> FileKind:
    return FileKind(f"compressed by {by}", f"decompress it first: {command}", is_compressed=True)


def _encoded(encoding: str) -> FileKind:
    return FileKind(f"text in {encoding}", f"convert it: iconv -f {encoding} -t UTF-8")


def _datasets(name: str, path: str) -> FileKind:
    return FileKind(name, f'give it the ending .{path} and set data.source = "auto"')


NUMPY = FileKind("a NumPy array (np.save)", 'for an array of token ids set data.source = "tokens"')
MEGATRON_INDEX = FileKind("an index of Megatron", 'for token ids set data.source = "tokens" and give its .bin file')
PARQUET = _datasets("a Parquet table", "parquet")

_MAGIC: dict[bytes, FileKind] = {
    b"\x1f\x8b\x08": _compressed("gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": _compressed("zstd", "zstd -d"),
    b"\xfd7zXZ\0": _compressed("xz", "unxz"),
    b"\x04\x22\x4d\x18": _compressed("lz4", "lz4 -d"),
    b"BZh91AY&SY": _compressed("bzip2", "bunzip2"),
    b"PK\x03\x04": FileKind("a zip archive (also of np.savez or torch.save)", "unpack it first", is_compressed=True),
    b"\x7fELF": FileKind("a program (ELF)", "leave it out of the glob"),
    b"%PDF-": FileKind("a PDF", "extract its text first: pdftotext"),
    b"PAR1": PARQUET,
    b"ARROW1\0\0": _datasets("an Arrow file", "arrow"),
    b"\x89HDF\r\n\x1a\n": FileKind("an HDF5 file", "write its data as text or as token ids"),
    b"SQLite format 3\0": FileKind("an SQLite database", "write its text into files first"),
    b"\x89PNG\r\n\x1a\n": FileKind("an image (PNG)", "leave it out of the glob"),
    b"\xff\xd8\xff": FileKind("an image (JPEG)", "leave it out of the glob"),
    b"\x93NUMPY": NUMPY,
    b"MMIDIDX\0\0": MEGATRON_INDEX,
    b"TNTIDX\0\0": FileKind("an index of an old format of Megatron or fairseq", "write the data as MMIDIDX"),
}
"""First bytes -> what the file is."""
_BYTE_ORDER_MARKS: dict[bytes, FileKind] = {  # the longer ones first
    b"\xff\xfe\0\0": _encoded("UTF-32"),
    b"\0\0\xfe\xff": _encoded("UTF-32"),
    b"\xff\xfe": _encoded("UTF-16"),
    b"\xfe\xff": _encoded("UTF-16"),
}


def read_head(file: Path) -> bytes:
    """Read the first bytes of a file."""
    with file.open("rb") as stream:
        return stream.read(HEAD_BYTES)


def kind_of(head: bytes, *, is_text: bool) -> FileKind | None:
    """Recognise a file by its first bytes; None for text and for token ids.

    `is_text` also looks for the marks of encodings, of two bytes, which an id of 16 bits may be.
    """
    for magic, kind in _MAGIC.items():
        if head.startswith(magic) and (magic[:2] != b"\x1f\x8b" or _is_gzip(head)):
            return kind
    marks = _BYTE_ORDER_MARKS if is_text else {}
    return next((kind for mark, kind in marks.items() if head.startswith(mark)), None)


def zeros_of(head: bytes) -> str:
    """Say that first bytes have more zeros than text has, and a way out; empty for text."""
    if (number := head.count(0)) <= _FEW_ZEROS:
        return ""
    return (
        f"{number} of its first {len(head)} bytes are 0, as in UTF-16 or in a binary file; convert it (iconv -f "
        "UTF-16LE -t UTF-8), or leave it out"
    )


def _is_gzip(head: bytes) -> bool:
    """Its magic has only three bytes, which two token ids may have."""
    try:
        return zlib.decompressobj(wbits=31).decompress(head) is not None
    except zlib.error:
        return False
