"""Token files are read piece by piece; one that becomes shorter is named and does not end the process by SIGBUS."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.open_files import few_open_files

from titan_moe import cli
from titan_moe.config import Recipe
from titan_moe.data.corpus import Corpus
from titan_moe.data.loader import Loader
from titan_moe.data.token_file import OpenFiles, TokenFile
from titan_moe.metrics.meter import Meter

TOKENS = np.arange(100_000) % 251


def test_token_file_reads_as_an_array(tmp_path: Path) -> None:
    path, dtype = tmp_path / "tokens.bin", np.dtype("<u2")
    TOKENS.astype(dtype).tofile(path)
    file = TokenFile(path, dtype)
    assert len(file) == len(TOKENS)
    for piece in (slice(0, 5), slice(99_990, 200_000), slice(-1, None), slice(7, 7)):
        assert np.array_equal(file[piece], TOKENS[piece])
    assert file[:5].dtype == dtype


def test_token_file_that_becomes_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    TOKENS.astype("<u2").tofile(path)
    corpus = Corpus([TokenFile(path, np.dtype("<u2"))], np.array([len(TOKENS)]), vocab_size=256)
    with path.open("r+b") as file:
        file.truncate(100_000)
    assert len(corpus.read(49_000, 50_000).tokens) == 1000
    with pytest.raises(
        ValueError, match=r"data.path: .*tokens.bin has become shorter .* 100000 bytes instead of 200000"
    ):
        corpus.read(49_999, 50_001)


def test_more_token_files_than_a_process_may_open(
    tmp_path: Path, make_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    ids = np.arange(1500 * 4, dtype="<u2").reshape(1500, 4)
    for number, part in enumerate(ids):
        part.tofile(tmp_path / f"{number:04}.bin")
    data = {"source": "tokens", "path": str(tmp_path / "*.bin"), "tokenizer": "", "is_shuffled": False}
    with few_open_files(60):
        loader = open_loader(make_recipe(data=data, model={"vocab_size": 6000}))
        first, second = loader.next_step(), loader.next_step()
        for _ in range(40):
            loader.next_step()
        assert loader.fingerprint().startswith("6000 tokens")
        assert len(os.listdir("/proc/self/fd")) <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 20
    assert first.tokens_MBN.flatten().tolist() == list(range(128))
    assert second.tokens_MBN.flatten().tolist() == list(range(128, 256))


def test_others_may_have_many_files_open(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.bin" for number in range(20)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]))
    open_files = OpenFiles()
    with few_open_files(4):
        assert b"".join(open_files.read(file, 1, 0) for file in files * 2) == bytes(range(20)) * 2


def test_files_are_opened_again_and_must_be_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_moe.data.token_file._MAX_OPEN_FILES", 1)
    files, paths = OpenFiles(), [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(b"1234")
    assert [files.read(path, 2, 1) for path in (*paths, *paths)] == [b"23"] * 4
    (tmp_path / "new").write_bytes(b"123456")
    (tmp_path / "new").rename(paths[0])
    with pytest.raises(ValueError, match=r"data.path: .*/a has been replaced while the run reads it; restore"):
        files.read(paths[0], 2, 1)
    paths[0].unlink()
    files.read(paths[1], 2, 1)
    with pytest.raises(ValueError, match=r"data.path: .*/a cannot be opened while the run reads it: No such file"):
        files.read(paths[0], 2, 1)


def test_run_with_a_shortened_file_ends_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, log = tmp_path / "tokens.bin", Meter.log
    (TOKENS % 64).astype("<u2").tofile(path)

    def log_and_shorten(self: Meter, step: int, **values: Any) -> None:
        log(self, step, **values)
        if step == 3:
            os.truncate(path, 2)

    monkeypatch.setattr(Meter, "log", log_and_shorten)
    tiny = str(Path(__file__).parents[1] / "training" / "tiny.toml")
    data = ("--data.source=tokens", f"--data.path={path}", "--data.tokenizer=", f"--run.folder={tmp_path / 'run'}")
    assert cli.main(["train", tiny, *data]) == 2
    error = capsys.readouterr().err
    assert "tokens.bin has become shorter while the run reads it: 2 bytes" in error.splitlines()[-1]
    assert "Traceback" not in error
