"""Text files as documents: selection and order."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from titan_moe.config.data_files import find_files
from titan_moe.data.bad_rows import BadRowError
from titan_moe.data.text import find_text_files, read_documents


def test_text_glob_finds_files_at_any_depth_in_order(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/a.txt", "a.txt", "b/c/d.txt", "b/other.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.txt").mkdir()
    files = find_text_files(str(tmp_path / "**" / "*.txt"))
    assert [file.relative_to(tmp_path).as_posix() for file in files] == ["a.txt", "b/a.txt", "b/c/d.txt", "b/z.txt"]
    assert list(read_documents(files)) == ["a.txt", "b/a.txt", "b/c/d.txt", "b/z.txt"]


def test_text_file_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.bin").write_bytes(b"a")
    monkeypatch.setattr(os, "access", lambda file, mode: False)  # root may read everything
    with pytest.raises(ValueError, match=rf"data.path: {tmp_path}/a.bin cannot be read: permission denied; allow it"):
        find_files(str(tmp_path / "*.bin"), "data.path", "*.bin")


def test_text_invalid_utf8_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\xffb")
    assert list(read_documents([tmp_path / "a.txt"])) == ["a\ufffdb"]


def test_text_with_a_few_bad_bytes_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bytes that are not UTF-8 and those that are 0; a replacement character in the text is none of them."""
    (tmp_path / "a.txt").write_bytes(b"good text " * 5000 + b"\xe9\xe2\x82 \0" + "\ufffd naïve".encode())
    (tmp_path / "b.txt").write_text("good")
    with caplog.at_level("WARNING"):
        texts = list(read_documents([tmp_path / "a.txt", tmp_path / "b.txt"]))
    assert texts[0].endswith("\ufffd\ufffd \0\ufffd naïve") and texts[1] == "good"
    assert f"1 of 2 files (the first is {tmp_path / 'a.txt'}): 4 of 50,019 bytes (0.008 %) are not text" in caplog.text


def test_text_in_utf8_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("naïve → 数 \ufffd\ufffd" * 99)
    with caplog.at_level("WARNING"):
        list(read_documents([tmp_path / "a.txt"]))
    assert caplog.text == ""


GERMAN = "Die Prüfung über größere Mengen fällt später auf schöne Straßen. " * 40


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (np.random.default_rng(0).bytes(5000), r"of 5,000 bytes \([45]. %\) are not text in UTF-8; convert"),
        (GERMAN.encode("latin-1"), r"a.txt: 320 of 2,600 bytes \(12 %\) are not text in UTF-8; .*iconv -f LATIN1"),
        (GERMAN.encode("utf-16"), "a.txt is text in UTF-16, not text in UTF-8; convert it: iconv -f UTF-16 -t UTF-8"),
        ("plain words ".encode("utf-16-le") * 50, r"a.txt: 600 of 1,200 bytes \(50 %\)"),
        (gzip.compress(GERMAN.encode()), "a.txt is compressed by gzip, .*; decompress it first: gunzip"),
        (b"\x7fELF\x02\x01", r"a.txt is a program \(ELF\)"),
        (b"%PDF-1.7 ...", "a.txt is a PDF, .*pdftotext"),
        (b"PAR1....PAR1", 'a.txt is a Parquet table, .*; give it the ending .parquet and set data.source = "auto"'),
    ],
)
def test_text_that_is_none_is_refused_by_name(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(BadRowError, match=f"data.path: {tmp_path}/.*{words}"):
        list(read_documents([tmp_path / "a.txt"]))


def test_text_that_is_none_in_many_small_files_is_refused(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"20 of 20 files \(the first is .*0.txt\): 20 of 80 bytes \(25 %\)"):
        list(read_documents(find_text_files(str(tmp_path / "*.txt"))))


def test_text_glob_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data.path = 'nowhere/\*.txt' matches no file"):
        find_text_files("nowhere/*.txt")
    with pytest.raises(FileNotFoundError, match=rf"is a folder .*; give a glob such as '{tmp_path}/\*\*/\*.bin'"):
        find_files(f"{tmp_path}/", "data.path", "*.bin")
    with pytest.raises(FileNotFoundError, match="data.files = ''"):
        find_files("", "data.files")


@pytest.mark.slow
def test_text_standard_library_has_no_tests() -> None:
    files = find_text_files("python-stdlib")
    names = {file.as_posix() for file in files}
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert any(name.endswith("/argparse.py") for name in names)
    root = next(file for file in files if file.name == "argparse.py").parent
    inside = [file.relative_to(root).parts for file in files]
    assert not any({"test", "tests", "idlelib", "lib2to3", "site-packages"} & set(parts) for parts in inside)
    assert files == find_text_files("python-stdlib")
    assert sum(file.stat().st_size for file in files) > 5_000_000
