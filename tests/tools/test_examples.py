"""The examples run, and are short enough to be read at once."""

import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from support import runs

from titan_moe.config.dispatchers import DISPATCHERS
from titan_moe.parallel.dispatchers import BUILDERS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "tools" / "examples"
TINY = (
    "--model.num_layers=1", "--model.hidden_size=16", "--model.moe.ffn_hidden_size=16", "--train.seq_len_tokens=16",
    "--train.micro_batch_sequences=2", "--train.steps=2", "--optim.warmup_steps=0", "--optim.decay_steps=0",
    "--metrics.sample_tokens=0", "--validation.num_sequences=2",
)  # fmt: skip
one_process = runs.one_process


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Imports an example by name, in an empty working folder with two texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"{name} and two are three. " * 40)

    def load(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return __import__(name)

    return load


def test_examples_are_short_and_named_in_readmes() -> None:
    readmes = [ROOT / "README.md", ROOT / "recipes" / "README.md", *(ROOT / "titan_moe").rglob("README.md")]
    text = "".join(path.read_text() for path in readmes)
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 50 and f"tools/examples/{path.name})" in text, path


def test_a_layer_of_ours_learns_in_a_model_of_ones_own(example) -> None:
    losses = example("own_layer").main(num_steps=20)
    assert losses[-1] < 0.9 * losses[0]


def test_own_data_is_trained_on_and_continued(example, tmp_path: Path) -> None:
    example("own_data").main(f"{tmp_path}/*.txt", *TINY)
    text = example("continue_text").main("runs/mine", "one ", 4)
    assert text.startswith(b"one ") and len(text) == 8


def test_a_model_class_of_ones_own_is_trained(example, tmp_path: Path) -> None:
    example("own_model_class").main(f"--data.path={tmp_path}/*.txt", *TINY)
    assert (tmp_path / "runs" / "parallel" / "checkpoints" / "step-2" / ".metadata").exists()


@pytest.mark.slow
def test_a_run_is_traced(example, tmp_path: Path) -> None:
    words = (f"--data.path={tmp_path}/*.txt", *TINY, "--train.steps=20", "--profile.num_steps=1")
    assert {"attention", "experts"} <= example("trace_a_run").main(*words).parts.keys()


def test_a_dispatcher_of_ones_own_is_known_to_its_script(example, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nproc=2", "--parallel.ep=2", "--train.micro_batch_sequences=4", "--parallel.dispatcher=gathering"]
    with mock.patch.dict(DISPATCHERS), mock.patch.dict(BUILDERS):
        assert example("own_dispatcher").main(["check", str(ROOT / "recipes" / "quickstart.toml"), *words]) == 0
    assert "dispatcher gathering" in capsys.readouterr().out
