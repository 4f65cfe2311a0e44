"""Token files are read piece by piece; one that becomes shorter is named and does not end the process by SIGBUS."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from titan_moe.data.corpus import Corpus
from titan_moe.data.token_file import TokenFile

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


SHORTENING = """
import sys
from pathlib import Path
from titan_moe import cli
from titan_moe.metrics.meter import Meter
path, log = Path(sys.argv.pop(1)), Meter.log
def log_and_shorten(self, step, **values):
    log(self, step, **values)
    if step == 3:
        with path.open("r+b") as file:
            file.truncate(2)
Meter.log = log_and_shorten
sys.exit(cli.main())
"""


@pytest.mark.slow
def test_run_with_a_shortened_file_ends_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    (TOKENS % 64).astype("<u2").tofile(path)
    tiny = Path(__file__).parents[1] / "train" / "tiny.toml"
    data = ("--data.source=tokens", f"--data.path={path}", "--data.tokenizer=", f"--run.folder={tmp_path / 'run'}")
    command = [sys.executable, "-c", SHORTENING, str(path), "train", str(tiny), *data]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 2, ended.stderr
    assert "tokens.bin has become shorter while the run reads it: 2 bytes" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
