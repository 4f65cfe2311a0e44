"""A folder of a run that cannot be written is found before the model is built."""

import errno
from pathlib import Path

import pytest

from titan_moe.training import trainer


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        raise AssertionError("a model is built")

    monkeypatch.setattr(trainer, "assemble", build)


@pytest.mark.parametrize(("name", "words"), [("checkpoints", ()), ("traces", ("--profile.start_step=1",))])
def test_a_file_in_place_of_a_folder_is_found(
    tiny, name: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny(*words)
    run.folder.mkdir(parents=True)
    (run.folder / name).write_text("")
    assert run.train() == 2
    error = capsys.readouterr().err
    assert f"run.folder: {run.folder / name} cannot be written by rank 0: File exists; set a writable folder" in error
    assert [path.name for path in run.folder.iterdir()] == [name]


def test_read_only_storage_is_found(tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As a mount of it: the folder exists, permissions allow everything, and no file can be made."""
    write = Path.write_bytes

    def refuse(path: Path, data: bytes) -> int:
        if path.parent.name == "checkpoints":
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    run = tiny()
    assert run.train() == 2
    assert "checkpoints cannot be written by rank 0: Read-only file system" in capsys.readouterr().err
    assert not run.folder.exists(), "a refused recipe leaves no folder"
