"""A file that another file names is read only if reading it ends."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_moe.config.regular_file import open_regular


def test_regular_files_and_links_to_them_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"abc"


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/dev/tty"),
        _socket,
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("absent"),
    ],
    ids=["folder", "pipe", "zero", "terminal", "socket", "loop", "dangling"],
)
@pytest.mark.usefixtures("ends_soon")
def test_other_files_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    make(Path("other"))
    with pytest.raises(OSError):
        open_regular("other")
