"""Files of data by their content."""

import os
import shutil
from pathlib import Path

import pytest

from titan_moe.data import content
from titan_moe.data.content import content_of


def _files(folder: Path, *texts: str) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files = [folder / f"{number}.txt" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    return files


def test_content_is_the_same_elsewhere_and_later(tmp_path: Path) -> None:
    first = content_of(_files(tmp_path / "a", "one", "two"), tmp_path / "cache", notes_it=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copyfile)
    assert content_of(sorted((tmp_path / "b").iterdir()), tmp_path / "cache", notes_it=False) == first
    others = (("one", "tw"), ("onet", "wo"), ("two", "one"), ("one",), ("one", "two", ""))
    found = {content_of(_files(tmp_path / "c", *texts), tmp_path / "other", notes_it=False) for texts in others}
    assert len(found | {first}) == 6
    assert not (tmp_path / "other").exists()


def test_content_is_read_once_while_files_keep_their_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = _files(tmp_path / "a", "one", "two")
    first = content_of(files, tmp_path / "cache", notes_it=True)
    with monkeypatch.context() as patched:
        patched.setattr(content, "_hash", pytest.fail)
        assert content_of(files, tmp_path / "cache", notes_it=False) == first
    files[0].write_text("0ne")
    os.utime(files[0], (1, 1))
    assert content_of(files, tmp_path / "cache", notes_it=True) != first
    for note in (tmp_path / "cache" / "content").iterdir():
        note.write_text("cut")  # as after a full disk
    assert len(content_of(files, tmp_path / "cache", notes_it=False)) == 64
