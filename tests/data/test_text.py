"""Text files as documents: selection and order."""

import os
from pathlib import Path

import pytest

from titan_moe.data.text import find_files, find_text_files, read_documents


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


def test_text_glob_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data.path = 'nowhere/\*.txt' matches no file"):
        find_text_files("nowhere/*.txt")
    with pytest.raises(FileNotFoundError, match=rf"is a folder .*; give a glob such as '{tmp_path}/\*\*/\*.bin'"):
        find_files(f"{tmp_path}/", "data.path", "*.bin")
    with pytest.raises(FileNotFoundError, match="data.files = ''"):
        find_files("", "data.files")


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
