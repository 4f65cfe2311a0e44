"""The commands that use a trained model: generate, evaluate and average, on a run and on Hugging Face's checkpoints."""

import io
import json
import math
import re
import socket
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from support.runs import Run, run_command

from titan_moe import cli
from titan_moe.checkpoint.storage import PlainReader, load_slices
from titan_moe.config import RecipeError, load_recipe, refusals
from titan_moe.data.chat.prompts import read_prompts
from titan_moe.models.transformer import Transformer
from titan_moe.training import use

TEXT = "the cat sat on the mat and the dog sat on the log. "


@pytest.fixture(scope="module")
def trained(make_run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on bytes of text with two checkpoints, and its data."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(6):
        (folder / f"{number}.txt").write_text(TEXT * (20 + number))
    data = (
        "--data.source=text",
        f"--data.path={folder}/*.txt",
        "--data.holdout_fraction=0.3",
        "--model.vocab_size=256",
    )
    often = ("--checkpoint.every_steps=20", "--validation.every_steps=20", "--validation.num_sequences=4")
    run = make_run(*data, *often, "--train.steps=40", "--optim.decay_steps=0")
    assert run.train() == 0
    run.texts = folder
    return run


def ours(run: Run, step: int) -> Transformer:
    model = Transformer(load_recipe(run.folder / "recipe.toml").model)
    state = model.state_dict()
    load_slices(state, PlainReader(run.folder / "checkpoints" / f"step-{step}"))
    model.load_state_dict(state)
    return model


def out_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    device = () if words[0] == "average" else ("--run.device=cpu",)
    assert cli.main([*map(str, words), *device]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_run_continues_a_prompt(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Greedily as its model does in Python; of a run's folder the newest checkpoint."""
    prompt_BN = torch.tensor([[*b"the cat"]])
    for step, place in ((40, trained.folder), (20, trained.folder / "checkpoints" / "step-20")):
        expected = ours(trained, step).generate(prompt_BN, 20, use_cache=False)
        said = out_of(capsys, "generate", place, "the cat", "--max-tokens", 20)
        assert said == bytes(expected[0].tolist()).decode(errors="replace") + "\n"


def test_a_run_in_fp8_has_room_for_any_prompt(trained: Run) -> None:
    """Of whatever number of tokens: generating has no weight gradients, which need a multiple."""
    words = ["--precision.linears=fp8_rowwise", "--precision.backend=native", "--model.hidden_size=32"]
    recipe = load_recipe(trained.folder / "recipe.toml", words)
    assert not [problem for problem in refusals(recipe, 1) if "multiple" in problem]
    for num_tokens in (3, 11):
        sized = use._with_room(recipe, [[0] * num_tokens], use.Sampling(max_tokens=7))
        assert not [problem for problem in refusals(sized, 1) if "multiple" in problem]
        assert sized.train.seq_len_tokens >= num_tokens + 7


def test_prompts_of_a_file_are_answered_in_lines(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("the cat sat\n\nand the dog\nthe\n")
    options = ("--prompts", tmp_path / "prompts.txt", "--max-tokens=9", "--batch-size=2", "--temperature=0.7")
    answers = [json.loads(line) for line in out_of(capsys, "generate", trained.folder, *options).splitlines()]
    assert [answer["prompt"] for answer in answers] == ["the cat sat", "and the dog", "the"]
    assert all(answer["num_tokens"] == 9 and len(answer["completion"]) > 4 for answer in answers)
    again = out_of(capsys, "generate", trained.folder, *options).splitlines()
    assert [json.loads(line) for line in again] == answers, "the seed decides"
    assert out_of(capsys, "generate", trained.folder, *options, "--seed=1").splitlines() != again


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    lines = ["one\u2028two\x85three\x0b\x0c", "four"]
    (tmp_path / "p.txt").write_bytes("\r\n".join(lines).encode())
    assert read_prompts(None, str(tmp_path / "p.txt")) == lines
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": lines[0]}, ensure_ascii=False))
    assert read_prompts(None, str(tmp_path / "p.jsonl")) == lines[:1]
    assert read_prompts(None, str(tmp_path / "p.jsonl"), is_chat=True)[0].messages[0]["content"] == lines[0]  # type: ignore[union-attr]


def test_bytes_are_bytes_whatever_the_source(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", trained.folder, "the cat", "--max-tokens=3"]
    no_data = ["--data.source=synthetic", "--data.path=", "--data.holdout_fraction=0"]
    assert out_of(capsys, *words, *no_data, "--data.tokenizer=bytes") == out_of(capsys, *words)
    assert cli.main([*map(str, words), *no_data, "--run.device=cpu"]) == 2
    assert "a prompt is ids, such as '5 7', not 'the cat'" in capsys.readouterr().err


def test_longrope_bounds_texts_and_not_forwards(trained: Run) -> None:
    words = ["--model.attention.longrope_short_factor=[1,1,1,1]", "--model.attention.longrope_long_factor=[2,2,2,2]"]
    recipe = load_recipe(trained.folder / "recipe.toml", [*words, "--model.attention.longrope_original_tokens=32"])
    sized = use._with_room(recipe, [[0] * 10] * 8, use.Sampling(max_tokens=20))
    assert [problem for problem in refusals(sized, 1) if "longrope_original" in problem]
    assert not [problem for problem in refusals(use._for_texts(sized), 1) if "longrope_original" in problem]
    with pytest.raises(RecipeError, match="has 10 tokens, with --max-tokens 33, more than .*lower --max-tokens"):
        use.generate(recipe, ["0123456789"], use.Sampling(max_tokens=23))


def test_an_evaluation_is_that_of_the_run(
    trained: Run, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long one says how far it is."""
    monkeypatch.setattr("titan_moe.training.evaluate.EVERY_SECONDS", 0.0)
    with caplog.at_level("INFO", logger="titan_moe"):
        row = out_of(capsys, "evaluate", trained.folder, "--train.micro_batch_sequences=1").splitlines()[1].split()
    said = [message for message in caplog.messages if message.startswith("evaluating ")]
    assert [re.search(r": (\d+)% of 4 sequences a rank, .* min left", message)[1] for message in said] == [
        *("25", "50", "75")
    ]
    assert float(row[-4]) == pytest.approx(trained.column("validation_loss")[-1], abs=1e-5)
    assert float(row[-3]) == pytest.approx(math.exp(float(row[-4])), rel=1e-3)


def test_each_set_has_its_line_and_their_mean_is_that_of_the_run(
    trained: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = {f"of_{name}": f"{trained.texts}/{name}.txt" for name in (0, 5)}
    alone = out_of(capsys, "evaluate", trained.folder, *(f"--data.path={path}" for path in sets.values()))
    losses = [line.split()[1] for line in alone.splitlines()[1:3]]
    words = [f"--validation.sets.{name}={path}" for name, path in sets.items()]
    whole = [*words, "--validation.num_sequences=999", "--data.holdout_fraction=0"]
    rows = [line.split("  ") for line in out_of(capsys, "evaluate", trained.folder, *whole).splitlines()[1:]]
    assert [row[0] for row in rows] == [*sets, "mean of sets"]
    found = [next(filter(None, row[1:])).strip() for row in rows]
    assert found[:2] == losses
    assert float(found[2]) == pytest.approx(sum(map(float, losses)) / 2, abs=2e-5)


def test_each_path_is_a_source(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss, by brute force over the whole text; a byte a token but for the ends of documents."""
    paths = [f"{trained.texts}/{name}.txt" for name in (0, 5)]
    table = out_of(capsys, "evaluate", trained.folder, *(f"--data.path={path}" for path in paths))
    header, *rows = (line.split() for line in table.splitlines())
    assert [row[0] for row in rows] == [*paths, "all"]
    model, num_all, sum_all = ours(trained, 40), 0, 0.0
    for path, row in zip(paths, rows, strict=False):
        ids = torch.tensor([*Path(path).read_bytes(), 0])
        number = (len(ids) - 1) // 32
        tokens = ids[: number * 32 + 1].unfold(0, 33, 32)
        total = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).item()
        assert float(row[1]) == pytest.approx(total / (number * 32), abs=2e-5)
        num_bytes = int((tokens[:, 1:] != 0).sum())
        assert float(row[3]) == pytest.approx(total / math.log(2) / num_bytes, abs=2e-5)
        assert int(row[4].replace(",", "")) == number * 32
        num_all, sum_all = num_all + number * 32, sum_all + total
    assert float(rows[2][1]) == pytest.approx(sum_all / num_all, abs=2e-5)


def said_on_a_rank(port: int, words: list[str]) -> tuple[int, str]:
    with redirect_stdout(io.StringIO()) as out:
        code, _ = run_command(port, words)
    return code, out.getvalue()


@pytest.mark.parametrize(
    "layout",
    [
        ("--parallel.ep=2", "--parallel.dispatcher=alltoall"),
        ("--parallel.tp=2",),
        ("--parallel.pp=2",),
        ("--parallel.cp=2", "--parallel.cp_kind=allgather"),
    ],
    ids=["ep", "tp", "pp", "cp"],
)
@pytest.mark.few("ep")
def test_ranks_say_what_one_says(
    trained: Run, ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: tuple[str, ...]
) -> None:
    data = ("--data.source=text", f"--data.path={trained.texts}/*.txt")
    (tmp_path / "prompts.txt").write_text("the cat sat\nand the dog\nthe\n")
    several = ("generate", trained.folder, f"--prompts={tmp_path}/prompts.txt", "--max-tokens=9", "--temperature=0.1")
    one = ("generate", trained.folder, "the cat", "--max-tokens=9")
    for words in (("evaluate", trained.folder, *data), one, several):
        alone = out_of(capsys, *words)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        answers = ranks(2, said_on_a_rank, port, [*map(str, words), "--run.device=cpu", *layout])
        assert answers == [(0, alone), (0, "")]


def test_an_average_is_the_mean_and_a_checkpoint(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which a run goes on from, and an export takes."""
    steps, mean = [trained.folder / "checkpoints" / f"step-{step}" for step in (20, 40)], tmp_path / "mean"
    out_of(capsys, "average", *steps, mean)
    models = [ours(trained, step).state_dict() for step in (20, 40)]
    state = {name: torch.empty_like(tensor) for name, tensor in models[0].items()}
    load_slices(state, PlainReader(mean))
    for name, tensor in state.items():
        assert torch.equal(tensor, (models[0][name] + models[1][name]) / 2), name
    assert out_of(capsys, "generate", mean, "the cat", "--max-tokens=3").startswith("the cat")
    recipe = trained.folder / "recipe.toml"
    words = ["train", recipe, f"--run.folder={tmp_path / 'next'}", f"--checkpoint.load_from={mean}", "--train.steps=1"]
    out_of(capsys, *words)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_a_checkpoint_of_the_averages_that_a_run_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_tied: bool
) -> None:
    tied = ("--model.embeddings_are_tied=true", "--model.embedding_init_std=1") if is_tied else ()
    run = Run(tmp_path / "run", "--train.steps=4", "--optim.ema_decay=0.5", "--optim.warmup_steps=0", *tied)
    assert run.train() == 0
    step, out = run.folder / "checkpoints" / "step-4", tmp_path / "out"
    out_of(capsys, "average", step, out, "--ema")
    reader, written = PlainReader(step), PlainReader(out)
    names = written.metadata.state_dict_metadata
    state = {name: torch.empty(tuple(names[name].size)) for name in names if hasattr(names[name], "size")}
    kept = {f"optimizer.state.{name}.ema": name for name in state}
    kept = {there: name for there, name in kept.items() if there in reader.metadata.state_dict_metadata}
    averages = {there: torch.empty_like(state[name]) for there, name in kept.items()}
    weights = {name: torch.empty_like(state[name]) for name in kept.values()}
    for values, source in ((state, written), (averages, reader), (weights, reader)):
        load_slices(values, source)
    assert len(kept) > 10 and ("head.weight" in kept.values()) != is_tied
    for there, name in kept.items():
        assert torch.equal(state[name], averages[there]) and not torch.equal(state[name], weights[name]), name
    if is_tied:
        assert torch.equal(state["embed.weight"], state["head.weight"])
    assert (
        out_of(capsys, "evaluate", step, "--ema") == out_of(capsys, "evaluate", out) != out_of(capsys, "evaluate", step)
    )
    assert out_of(capsys, "generate", step, "7", "--ema") == out_of(capsys, "generate", out, "7")
    exported = {
        "averages": (step, "--ema", "--dtype=fp32"),
        "mean": (out, "--dtype=fp32"),
        "weights": (step, "--dtype=fp32"),
    }
    for name, (source, *options) in exported.items():
        assert cli.main(["export", str(source), str(tmp_path / name), *options]) == 0, capsys.readouterr().err
    files = [next((tmp_path / name).glob("*.safetensors")).read_bytes() for name in exported]
    assert files[0] == files[1] != files[2]


def test_an_average_of_others_is_refused(trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, out = trained.folder / "checkpoints" / "step-20", tmp_path / "out"
    assert cli.main(["average", str(step), str(out)]) == 2
    assert "two checkpoints at least" in capsys.readouterr().err
    assert cli.main(["average", str(step), str(out), "--ema"]) == 2
    assert "step-20 has no averages of its weights" in capsys.readouterr().err
    for words in (["generate", "the"], ["evaluate"], ["export", str(out)]):
        assert cli.main([words[0], str(step), *words[1:], "--ema"]) == 2
        said = capsys.readouterr().err
        assert "step-20 has no averages of its weights; a run keeps them with" in said and said.count("step-20") == 1
    other = Run(tmp_path / "other", "--train.steps=1")
    assert other.train() == 0
    assert cli.main(["average", str(step), str(other.folder), str(out)]) == 2
    assert "embed.weight (64, 32) instead of (256, 32)" in capsys.readouterr().err
    (other.folder / "checkpoints" / "step-1" / "manifest.json").write_text("{}")
    assert cli.main(["average", str(step), str(other.folder), str(out)]) == 2
    assert "step-1 is damaged: manifest.json is not as it was written" in capsys.readouterr().err
    assert not out.exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["generate", "absent", "x"], "absent is no folder; name the folder of a run"),
        (["generate", "RUN"], "needs one of a prompt and --prompts"),
        (["generate", "RUN", "--prompts=absent.txt"], "absent.txt cannot be read"),
        (["generate", "RUN", "x", "--top-p=0"], "--top-p = 0.0 must be above 0 and at most 1"),
        (["generate", "RUN", "x", "--temperature=-1", "--max-tokens=0"], "--max-tokens = 0 must be at least 1"),
        (["generate", "RUN", "x", "--model.moe.top_k=9"], "top_k = 9"),
        (["generate", "RUN", "x", "--model.num_layers=3"], "does not fit this run's model"),
        (["evaluate", "RUN", "--data.source=text", "--data.path=absent/*"], "absent/*"),
    ],
)
def test_what_is_wrong_is_named(
    trained: Run, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    assert cli.main([str(trained.folder) if word == "RUN" else word for word in words]) == 2
    assert problem in capsys.readouterr().err
