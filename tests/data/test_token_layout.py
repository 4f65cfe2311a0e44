"""Token files of NumPy and llm.c are read past their headers; ids of another width, and other files, are refused."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from titan_moe.config import Recipe
from titan_moe.data.corpus import Corpus
from titan_moe.data.token_file import TokenFile
from titan_moe.data.token_layout import TokenLayout, read_layout

IDS = np.random.default_rng(0).integers(0, 50000, 5000)
LARGE_IDS = np.random.default_rng(1).integers(0, 151000, 5000)


@pytest.fixture
def layout_of(tmp_path: Path, make_recipe: Callable[..., Recipe]) -> Callable[..., TokenLayout]:
    def layout(dtype: str = "uint16") -> TokenLayout:
        return read_layout(tmp_path / "a.bin", make_recipe(data={"source": "tokens", "token_dtype": dtype}).data)

    return layout


def ids_of(file: Path, layout: TokenLayout) -> list[int]:
    return TokenFile(file, layout.dtype, layout.offset_bytes, layout.num_tokens)[0 : layout.num_tokens].tolist()


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i4", "<i8", ">u2"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_array_of_numpy_is_read_past_its_header(
    tmp_path: Path, layout_of: Callable[..., TokenLayout], dtype: str, version: tuple[int, int]
) -> None:
    with (tmp_path / "a.bin").open("wb") as stream:
        np.lib.format.write_array(stream, IDS.astype(dtype), version)
    assert ids_of(tmp_path / "a.bin", layout_of()) == IDS.tolist()


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (IDS.astype("f4"), "of float32 with the shape"),
        (IDS.reshape(50, 100), r"of int64 with the shape \(50, 100\), not a list of integers; save a flat array"),
        (np.array([{}], dtype=object), "of object"),
    ],
)
def test_other_arrays_of_numpy_are_refused(
    tmp_path: Path, layout_of: Callable[..., TokenLayout], array: np.ndarray, words: str
) -> None:
    with (tmp_path / "a.bin").open("wb") as stream:
        np.save(stream, array)
    with pytest.raises(ValueError, match=rf"data.path: .*a.bin is a NumPy array \(np.save\) {words}"):
        layout_of()


def test_shortened_array_of_numpy_is_refused(tmp_path: Path, layout_of: Callable[..., TokenLayout]) -> None:
    with (tmp_path / "a.bin").open("wb") as stream:
        np.save(stream, IDS.astype("<u2"))
        stream.truncate(3000)
    with pytest.raises(ValueError, match=r"has 3,000 bytes, and NumPy's header gives it 5,000 ids of uint16: 10,128"):
        layout_of()
    (tmp_path / "a.bin").write_bytes(b"\x93NUMPY\x01\x00\x20\x00{'descr': " + b"x" * 99)
    with pytest.raises(ValueError, match="a.bin has a header of NumPy that cannot be read"):
        layout_of()


def llm_c(magic: int, version: int, ids: np.ndarray, dtype: str) -> bytes:
    """As `write_datafile` of llm.c defines it: 256 integers of 32 bits, then the ids."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids)
    return header.tobytes() + ids.astype(dtype).tobytes()


@pytest.mark.parametrize(
    ("magic", "version", "dtype", "ids"), [(20240520, 1, "<u2", IDS), (20240801, 7, "<u4", LARGE_IDS)]
)
def test_file_of_llm_c_is_read_past_its_header(
    tmp_path: Path, layout_of: Callable[..., TokenLayout], magic: int, version: int, dtype: str, ids: np.ndarray
) -> None:
    (tmp_path / "a.bin").write_bytes(llm_c(magic, version, ids, dtype))
    for token_dtype in ("uint16", "uint32"):
        assert ids_of(tmp_path / "a.bin", layout_of(token_dtype)) == ids.tolist()
    with (tmp_path / "a.bin").open("ab") as stream:
        stream.write(b"1234")
    with pytest.raises(ValueError, match=r"bytes, and llm.c's header gives it 5,000 ids of uint"):
        layout_of()


@pytest.mark.parametrize(
    ("stored", "ids", "token_dtype", "words"),
    [
        ("<u4", LARGE_IDS, "uint16", "is a file of 32-bit ids: every second id is 0 or small .*set .* to 'uint32'"),
        ("<u4", IDS, "uint16", "is a file of 32-bit ids"),
        ("<i8", IDS, "uint32", "is a file of 64-bit ids: the upper 32 of every 64 bits are 0.*; convert it: np.from"),
        ("<i8", LARGE_IDS, "uint16", "is a file of 64-bit ids"),
        ("<i8", np.append(np.zeros(60000, int), LARGE_IDS), "uint32", "is a file of 64-bit ids"),
    ],
)
def test_ids_of_another_width_are_refused(
    tmp_path: Path,
    layout_of: Callable[..., TokenLayout],
    stored: str,
    ids: np.ndarray,
    token_dtype: str,
    words: str,
) -> None:
    ids.astype(stored).tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match=f"data.path: .*a.bin {words}"):
        layout_of(token_dtype)


@pytest.mark.parametrize("ids", [IDS, IDS[:20], IDS % 200, np.zeros(5000), np.full(64, 35615), np.arange(5000) % 3])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_ids_of_their_own_width_are_read(
    tmp_path: Path, layout_of: Callable[..., TokenLayout], ids: np.ndarray, dtype: str
) -> None:
    ids.astype(dtype).tofile(tmp_path / "a.bin")
    assert ids_of(tmp_path / "a.bin", layout_of(dtype)) == ids.tolist()
    assert not layout_of(dtype).is_described


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"plain text, and more of it. " * 90, 'contains text, not token ids; set data.source = "text"'),
        ("naïve words → 数, and more of them. ".encode() * 900, "contains text, not token ids"),
        (gzip.compress(IDS.tobytes()), "is compressed by gzip, not token ids; decompress it first: gunzip"),
        (b"PK\x03\x04" + bytes(99), r"is a zip archive \(also of np.savez or torch.save\), not token ids"),
        (b"\x7fELF" + bytes(99), r"is a program \(ELF\), not token ids"),
    ],
)
def test_files_of_other_kinds_are_refused(
    tmp_path: Path, layout_of: Callable[..., TokenLayout], data: bytes, words: str
) -> None:
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(ValueError, match=f"data.path: .*a.bin {words}"):
        layout_of()


def test_bad_id_late_in_a_file_is_named_by_its_place(tmp_path: Path, layout_of: Callable[..., TokenLayout]) -> None:
    ids = IDS % 100
    ids[4321] = 257
    (tmp_path / "a.bin").write_bytes(llm_c(20240520, 1, ids, "<u2"))
    layout = layout_of()
    file = TokenFile(tmp_path / "a.bin", layout.dtype, layout.offset_bytes, layout.num_tokens)
    corpus = Corpus([np.zeros(7, "u2"), file], np.array([5007]), vocab_size=256)
    with pytest.raises(ValueError, match=r"a.bin has the token id 257 at token 4,321 .* ids below 256"):
        corpus.read(4300, 4400)
