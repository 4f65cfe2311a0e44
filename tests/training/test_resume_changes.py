"""A resume with another recipe or other data: free, told or refused, as the table says. Garbage in metrics is kept."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_moe.config import load_recipe
from titan_moe.config.resume import FREE, LOGGED, REFUSED, Change, change_of
from titan_moe.layers.hash_router import balanced_table
from titan_moe.training.capacity_control import CapacityControl
from titan_moe.training.progress import Progress
from titan_moe.training.spikes import WINDOW_STEPS

pytestmark = pytest.mark.slow

BASE = ("--train.steps=2", "--checkpoint.every_steps=2", "--data.source=tokens", "--data.tokenizer=")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 2,000 token ids."""
    file = tmp_path_factory.mktemp("tokens") / "ids.bin"
    np.random.default_rng(1).integers(0, 64, 2000).astype("<u2").tofile(file)
    return file


@pytest.fixture(scope="module")
def base(make_run, tokens: Path):
    run = make_run(*BASE, f"--data.path={tokens}")
    assert run.train() == 0
    return run


@pytest.mark.few()
def test_a_table_that_a_checkpoint_does_not_have_is_refused(
    make_run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a resume and by a run that begins with its weights. The checkpoint's table goes on."""
    run, other = (make_run(*BASE[:2], "--model.moe.hash_layers=[1]") for _ in range(2))
    assert run.train() == 0
    model = load_recipe(run.folder / "recipe.toml").model
    np.save(tmp_path / "table.npy", balanced_table(model.vocab_size, model.moe.top_k, model.moe.num_experts, "else"))
    table, start = tmp_path / "table.npy", run.folder / "checkpoints" / "step-2"
    load = f"--checkpoint.load_from={start}"
    for refused, words in ((run, ["--train.steps=3"]), (other, [load])):
        assert refused.train(*words, f"--model.moe.hash_table={table}") == 2
        assert "has another table for layers.1.feed_forward.router than the checkpoint" in capsys.readouterr().err
    assert run.train("--train.steps=3") == other.train(load) == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("--model.moe.top_k=3", REFUSED),
        ("--model.moe.normalize_topk=false", REFUSED),
        ("--model.moe.route_scale=2", REFUSED),
        ("--model.attention.rope_theta=5000", REFUSED),
        ("--model.hidden_size=48", REFUSED),
        ("--model.embeddings_are_tied=true", REFUSED),
        ("--precision.master=fp64", REFUSED),
        ("--train.seq_len_tokens=16", REFUSED),
        ("--run.seed=7", REFUSED),
        ("--data.is_shuffled=false", REFUSED),
        ("--precision.compute=bf16", LOGGED),
        ("--model.moe.aux_loss_coef=1e-2", LOGGED),
        ("--model.moe.bias_update_speed=0", LOGGED),
        ("--train.global_batch_sequences=8", LOGGED),
        ("--optim.lr=3e-3", LOGGED),
        ("--optim.kind=muon", REFUSED),
        ("--perf.attention=math", LOGGED),
        ("--train.micro_batch_sequences=1", FREE),
        ("--memory.recompute=experts", FREE),
        ("--metrics.every_steps=2", FREE),
    ],
)
def test_resume_of_a_changed_recipe(
    base,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    change: str,
    expected: Change,
) -> None:
    run = base.copy(tmp_path / "run", last_step=2)
    key = change.removeprefix("--").partition("=")[0]
    assert change_of(key) is expected
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    code, said = run.train("--train.steps=3", change), caplog.text
    if expected is REFUSED:
        assert code == 2
        problem = capsys.readouterr().err
        assert f"{key} = " in problem and "may not change in a run; set it back, or" in problem
        assert ("if they fit this model" in problem) == key.startswith("model.")
        assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before
    else:
        assert code == 0 and run.column("step")[-1] == 3
        assert f"the recipe has changed since {run.folder}/checkpoints/step-2: " in said  # train.steps too
        assert (f"{key} = " in said) == (expected is LOGGED)


def test_resume_where_nothing_has_changed_says_nothing(base, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = base.copy(tmp_path / "run", last_step=2)
    caplog.set_level(logging.WARNING)
    assert run.train() == 0
    assert "changed" not in caplog.text and "manifest" not in caplog.text


def test_resume_with_moved_data(base, tokens: Path, tmp_path: Path) -> None:
    run = base.copy(tmp_path / "run", last_step=2)
    moved = tmp_path / "moved.bin"
    moved.write_bytes(tokens.read_bytes())
    assert run.train("--train.steps=3", f"--data.path={moved}") == 0


def test_resume_with_other_data_of_the_same_length_is_refused(
    base, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = base.copy(tmp_path / "run", last_step=2)
    other = tmp_path / "other.bin"
    ids = np.fromfile(tokens, dtype="<u2")
    ids[1500] = (ids[1500] + 1) % 64
    ids.tofile(other)
    assert run.train("--train.steps=3", f"--data.path={other}") == 2
    said = capsys.readouterr().err
    assert "the data differs from that of" in said and "it was 2000 tokens, sha256" in said
    assert run.column("step")[-1] == 2


def test_resume_with_edited_text_of_the_same_length_is_refused(
    tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without an edit it goes on from another working directory."""
    folder = tmp_path / "texts"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"{number} " * 100)
    run = tiny("--model.vocab_size=256", "--data.source=text", "--data.path=texts/*.txt", "--train.steps=2")
    assert run.train("--checkpoint.every_steps=2") == 0
    os.utime(folder / "3.txt", (1, 1))  # read again: equal content
    monkeypatch.chdir("/")
    assert run.again("--train.steps=3", "--checkpoint.every_steps=3") == 0
    assert len(list((tmp_path / "token_cache").glob("text-*"))) == 1
    monkeypatch.chdir(tmp_path)
    (folder / "3.txt").write_text("4 " * 100)
    assert run.train("--train.steps=4") == 2
    assert "the data differs from that of" in capsys.readouterr().err


def test_weights_of_another_model_are_told(base, tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = base.folder / "checkpoints" / "step-2"
    assert tiny("--train.steps=1").train(f"--checkpoint.load_from={weights}", "--model.moe.top_k=3") == 0
    assert f"the model differs from that of {weights}: model.moe.top_k = 3 (was 2)" in caplog.text


def test_resume_past_garbage_in_metrics(tiny, caplog: pytest.LogCaptureFixture) -> None:
    straight, run = (tiny("--train.steps=4", "--checkpoint.every_steps=2") for _ in range(2))
    assert straight.train() == 0
    assert run.train("--train.steps=2", "--optim.decay_steps=0") == 0
    file = run.folder / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    garbage = [b"\x00\xff\xfe\x80\n", b"[1]\n", b'{"step": 1e999}\n', b"[" * 100_000 + b"\n", b'{"step": 2, "lo']
    file.write_bytes(lines[0] + b"".join(garbage[:4]) + lines[1] + garbage[4])
    assert run.train("--optim.decay_steps=10") == 0
    assert run.column("step") == [1, 2, 3, 4]
    assert f"{file}: 5 lines are not records; moved to metrics.dropped.jsonl" in caplog.text
    assert (run.folder / "metrics.dropped.jsonl").read_bytes() == b"".join(garbage) + b"\n"


def test_checkpoint_has_the_resolved_recipe(base) -> None:
    manifest = json.loads((base.folder / "checkpoints" / "step-2" / "manifest.json").read_text())
    assert manifest["format"] == 1 and manifest["recipe"]["model.moe.num_experts"] == 4
    assert manifest["recipe"]["run.device"] == "cpu"


WINDOW = {"recent": [[2.0] * WINDOW_STEPS, [1.0] * WINDOW_STEPS], "num_seen": 70}
NOT_KNOWN = {"num_in_row": 0}, {"recent": [[0.0] * WINDOW_STEPS] * 2, "num_seen": 0}, {"factor": 1.75}, {"factor": 0.0}


@pytest.mark.parametrize(
    ("flat", "expected"),
    [
        ({"capacity_factor": 1.75}, NOT_KNOWN),
        ({"capacity_factor": 1.75, "num_skipped_in_row": 0, "spikes": "", "clones": ""}, NOT_KNOWN),
        (
            {"capacity_factor": 1.75, "num_skipped_in_row": 3, "spikes": json.dumps(WINDOW), "clones": ""},
            ({"num_in_row": 3}, WINDOW, {"factor": 1.75}, {"factor": 0.0}),
        ),
    ],
    ids=["two numbers", "nothing to go on with", "everything"],
)
def test_checkpoints_of_earlier_versions_mean_the_same(
    tiny, monkeypatch: pytest.MonkeyPatch, flat: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """They have flat keys, and the first versions fewer."""
    words = "--train.spike_sigmas=6", "--parallel.dispatcher=allgather", "--parallel.expert_rank_capacity_factor=auto"
    run = tiny("--train.steps=4", "--checkpoint.every_steps=2", "--optim.decay_steps=0", *words)
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "state_dict", lambda self: {"step": self.step, "tokens_seen": self.tokens_seen, **flat})
        assert run.train("--train.steps=2") == 0
    (run.folder / "checkpoints" / "step-2" / "manifest.json").unlink()
    load, loaded, began = Progress.load_state_dict, [], []

    def noted(self: Progress, state: dict[str, Any]) -> None:
        load(self, state)
        loaded.extend(each.state_dict() for each in self.states.values())
        began.extend(each.steps_to_wait for each in self.states.values() if isinstance(each, CapacityControl))

    monkeypatch.setattr(Progress, "load_state_dict", noted)
    assert run.train() == 0
    assert loaded == [{"factor": 0.0} if at == 2 else state for at, state in enumerate(expected)]
    assert began == [1] and run.column("capacity")[2]["factor"] == expected[2]["factor"], "after one step"
    assert run.column("step") == [1, 2, 3, 4] and run.column("tokens_seen")[-1] == 4 * 4 * 32
