"""Data that cannot be read on: the run saves and ends, and goes on after the repair as if nothing had been."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from titan_moe.config import load_recipe
from titan_moe.data.bad_rows import BadRowError
from titan_moe.training.read_ahead import ReadAhead, UnreadableDataError

pytestmark = pytest.mark.slow

STEP_TOKENS = 16 * 32
STEPS = 14
BAD = 11 * STEP_TOKENS + 10 * 32 + 6
"""A place that the twelfth step reads, on the second of two ranks. The first 4,096 tokens are read at the start."""


def ids(number: int = STEPS * STEP_TOKENS + 1) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 64, number).astype("<u2")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Token ids of 14 steps, one of them outside the vocabulary."""
    path, found = tmp_path / "ids.bin", ids()
    found[BAD] = 777
    found.tofile(path)
    return path


@pytest.fixture
def words(file: Path) -> tuple[str, ...]:
    data = ("--data.source=tokens", "--data.tokenizer=", f"--data.path={file}", "--data.is_shuffled=false")
    return (f"--train.steps={STEPS}", "--train.global_batch_sequences=16", *data)


def steps(run) -> list[dict]:
    return [record for record in run.trace if "loss" in record]


def test_bad_token_late_in_the_data_saves_and_is_repaired(
    tiny, file: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run, straight = tiny(*words, "--checkpoint.every_steps=11"), tiny(*words, "--checkpoint.every_steps=11")
    assert run.train() == 2 and run.saved_steps == [11]
    said = capsys.readouterr().err
    assert f"{file} has the token id 777 at token {BAD:,} (in the sequence from token {BAD - 6:,}" in said
    assert f"(the run is saved after step 11; to go on after the repair: titan-moe train {run.folder}/recipe" in said
    assert run.again() == 2 and run.saved_steps == [11]
    ids().tofile(file)
    assert run.again() == 0 and straight.train() == 0
    assert steps(run) == steps(straight) and len(steps(run)) == STEPS
    assert "; accepted: the run has ended because of it (data.path: " in caplog.text
    (change,) = (record for record in run.records if "data" in record)
    assert change["step"] == 11 and f"it was {change['data_before']}, it is {change['data']}; accepted" in caplog.text
    manifest = json.loads((run.folder / "checkpoints" / "step-14" / "manifest.json").read_text())
    assert manifest["data"] == change["data"] != change["data_before"]
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\1\0")
    capsys.readouterr()
    assert run.again("--train.steps=15") == 2, "the repaired data may not change again"
    assert "if the change is meant, set checkpoint.accept_changed_data = true" in capsys.readouterr().err


def test_bad_token_of_one_of_two_ranks_stops_both(
    ranks, tiny, file: Path, words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    run, straight = tiny(*words), tiny(*words)
    layout = ("--parallel.ep=2", "--parallel.dispatcher=alltoall", "--train.micro_batch_sequences=2")
    run.on(ranks, 2, *layout, exit_code=2)
    assert run.saved_steps == [11] and run.column("step") == list(range(1, 12))
    ids().tofile(file)
    run.on(ranks, 2, *layout)
    assert straight.train() == 0
    assert [record["step"] for record in steps(run)] == list(range(1, STEPS + 1))
    torch.testing.assert_close(run.column("loss"), straight.column("loss"), rtol=1e-5, atol=1e-5)


def test_bad_tokens_are_skipped_and_counted_over_ranks(
    ranks, tiny, file: Path, words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    found = np.fromfile(file, "<u2")
    found[[5000, 5001, BAD - STEP_TOKENS]] = 64
    found.tofile(file)
    run, alone = (tiny(*words, "--data.bad_rows=skip") for _ in range(2))
    run.on(ranks, 2, "--parallel.ep=2", "--parallel.dispatcher=alltoall", "--train.micro_batch_sequences=2")
    assert alone.train() == 0
    assert run.column("bad_rows")[-1] == alone.column("bad_rows")[-1] == 3
    assert f"skipped a bad row: data.path: {file} has the token id 64 at token 5,000 " in caplog.text
    torch.testing.assert_close(run.column("loss"), alone.column("loss"), rtol=1e-5, atol=1e-5)


def test_bad_held_out_token_saves_at_the_validation(
    tiny, file: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    ids().tofile(file)
    found = ids(4400)
    found[4232:] = 65535
    found.tofile(held_out := file.with_name("z.bin"))
    validation = ("--validation.every_steps=5", "--validation.num_sequences=32", "--data.holdout_fraction=0.4")
    run = tiny(*words, f"--data.path={file.parent}/*.bin", *validation)
    assert run.train("--train.micro_batch_sequences=4") == 2 and run.saved_steps == [5]
    assert f"{held_out} has the token id 65535 at token 4,232" in capsys.readouterr().err


def test_grown_data_goes_on_where_the_recipe_says_so(
    tiny, file: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    ids(8 * STEP_TOKENS + 1).tofile(file)
    run, straight = tiny(*words, "--optim.decay_steps=0"), tiny(*words, "--optim.decay_steps=0")
    assert run.train("--train.steps=6") == 0
    ids().tofile(file)
    assert ids()[: 8 * STEP_TOKENS].tolist() == ids(8 * STEP_TOKENS).tolist()
    assert run.train() == 2 and run.saved_steps == [6]
    said = capsys.readouterr().err
    assert "the data differs from that of" in said and "set checkpoint.accept_changed_data = true" in said
    assert run.train("--checkpoint.accept_changed_data=true") == 0 and straight.train() == 0
    for records in (ours := steps(run), expected := steps(straight)):
        for record in records:
            del record["epoch"]  # of other sizes
    assert ours == expected
    assert (
        "it was 4097 tokens, sha256" in caplog.text
        and "an epoch has 224 sequences (was 128); the run go" in caplog.text
    )
    (change,) = (record for record in run.records if "data" in record)
    assert change["data_before"].startswith("4097 tokens, ") and change["data"].startswith("7169 tokens, ")
    assert not load_recipe(run.folder / "recipe.toml", []).checkpoint.accept_changed_data


def test_broken_json_line_late_in_a_stream_saves_and_is_repaired(
    tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    lines = [json.dumps({"text": f"row {number} " * 8}) for number in range(60)]
    for name, some in (("a", lines[:30]), ("b", lines[30:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(some))
    data = ("--data.source=datasets", "--data.path=json", f"--data.files={tmp_path}/*.jsonl", "--data.is_streamed=true")
    data = (*data, "--data.stream_lanes=0")
    run, straight = (tiny("--train.steps=20", "--model.vocab_size=256", *data) for _ in range(2))
    assert straight.train() == 0
    good = (tmp_path / "b.jsonl").read_text()
    (tmp_path / "b.jsonl").write_text(good.replace(lines[35], lines[35][:-1]))
    assert run.train() == 2
    assert f"{tmp_path}/b.jsonl, line 6, is not JSON: " in capsys.readouterr().err
    (saved,) = run.saved_steps
    assert saved > 0 and steps(run) == steps(straight)[:saved]
    (tmp_path / "b.jsonl").write_text(good)
    assert run.again() == 0
    assert steps(run) == steps(straight)


def read_on_this_rank() -> tuple[list[int], tuple[str, bool]]:
    """Only rank 1 cannot read the second time; what each rank then knows."""

    def read_late() -> int:
        if dist.get_rank() == 1:
            raise BadRowError("z.bin, token 4")
        return 1

    data = ReadAhead(FailingLoader(9, ValueError("ids.bin, token 3")), num_steps=9)
    found = data.read_together(lambda: [dist.get_rank()])
    with pytest.raises(UnreadableDataError):
        data.read_together(read_late)
    return found, data.describe(dist.group.WORLD)


def test_read_together_fails_on_all_ranks(ranks) -> None:
    assert ranks(2, read_on_this_rank) == [([rank], ("z.bin, token 4", True)) for rank in range(2)]


def test_damaged_cache_of_a_run_saves_and_is_built_again(
    tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume meets a block of zeros that the run has not read before."""
    monkeypatch.setattr("titan_moe.data.cache._READ_AT_START_BYTES", 0)
    monkeypatch.setattr("titan_moe.data.checked_file.BLOCK_BYTES", 256)
    (tmp_path / "a.txt").write_text("".join(f"line {number} of a text\n" for number in range(300)))
    text = ("--data.source=text", f"--data.path={tmp_path}/a.txt", "--data.is_shuffled=false", "--optim.decay_steps=0")
    run, straight = (tiny("--train.steps=20", "--model.vocab_size=256", *text) for _ in range(2))
    assert straight.train() == 0 and run.train("--train.steps=4") == 0
    (file,) = run.folder.parent.glob("token_cache/text-*/tokens.bin")
    with file.open("r+b") as tokens:
        tokens.seek(1024)
        tokens.write(bytes(256))
    assert run.train() == 2
    said = capsys.readouterr().err
    assert f"{file} is damaged: block 4 of " in said and "(the run is saved after step 7;" in said
    assert not (run.folder / "bad_data.json").exists(), "the data itself is good"
    assert run.train() == 0
    assert run.trace == straight.trace


class FailingLoader:
    def __init__(self, num_steps: int, error: Exception) -> None:
        self.num_left, self.error = num_steps, error

    def read_ahead(self) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise self.error


def test_read_ahead_keeps_any_error_and_reads_no_further_than_the_run() -> None:
    data = ReadAhead(FailingLoader(3, OSError("gone")), num_steps=3)
    assert [data.read() for _ in range(5)] == [False] * 5
    loader = FailingLoader(1, ArithmeticError("bug"))
    data = ReadAhead(loader, num_steps=9)
    assert [data.read() for _ in range(3)] == [False, True, True] and loader.num_left == -1
    with pytest.raises(ArithmeticError, match="bug"):
        data.fail("words")
