"""A run as its user sees it: files, log, errors."""

import gc
import json
import logging
import re
import runpy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan_moe.config import Recipe, RecipeError, load_recipe
from titan_moe.config.parse import dump_recipe
from titan_moe.metrics import table
from titan_moe.metrics.table import Metric
from titan_moe.models.transformer import Transformer
from titan_moe.run.determinism import VARIABLES
from titan_moe.training import trainer
from titan_moe.training.build import Assembly, assemble

FIELDS = {
    "step", "loss", "aux_loss", "grad_norm", "lr", "tokens_seen", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu",
    "memory_gib", "step_ms", "expert_load", "idle_experts", "router_entropy", "bias_spread", "skipped_steps",
    "rerun_steps", "rerun_share",
}  # fmt: skip
EXAMPLE = Path(__file__).parents[2] / "tools" / "examples" / "continue_text.py"
ROUTER = "layers.1.feed_forward.router"
TEXT = ("--data.source=text", "--model.vocab_size=256", "--data.holdout_fraction=0.2", "--validation.num_sequences=4")


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Ten documents of words and their glob; the last two, in order of their names, are held out."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(10):
        words = [f"{word} {number + word * word % 7}\n" for word in range(20 + number)]
        (folder / f"{number}.txt").write_text("".join(words))
    return f"--data.path={folder}/*.txt"


@pytest.mark.slow
def test_trainer_learns_and_reports_every_step(tiny) -> None:
    run = tiny("--train.steps=40")
    assert run.train() == 0
    records = run.records
    assert [record["step"] for record in records] == list(range(1, 41))
    assert all(record.keys() == FIELDS for record in records)
    assert records[-1]["tokens_seen"] == 40 * 4 * 32
    assert all(record["aux_loss"] > 0 and record["grad_norm"] > 0 and record["step_ms"] > 0 for record in records)
    assert all(record["mfu"] is None and record["memory_gib"] > 0.05 for record in records)
    assert all(record["expert_load"].keys() == {ROUTER} and record["expert_load"][ROUTER] >= 1 for record in records)
    assert [record["lr"] for record in records[:6]] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01, 0.01])
    assert records[-1]["lr"] == pytest.approx(1e-3)
    for record in records:
        seconds = record["step_ms"] / 1e3
        assert record["tokens_per_second_per_gpu"] == pytest.approx(4 * 32 / seconds)
    assert records[0]["loss"] > 4 and records[-1]["loss"] < 2.5


@pytest.mark.slow
def test_trainer_tells_its_data_and_counts_epochs(tiny, text: str, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny(*TEXT, text, "--train.epochs=1.5", "--checkpoint.every_steps=10")
    with caplog.at_level("INFO"):
        assert run.train() == 0
    files = sorted(Path(text.partition("=")[2]).parent.iterdir())
    sizes = [file.stat().st_size + 1 for file in files]
    samples = (sum(sizes[:8]) - 1) // 32
    steps = int(1.5 * samples / 4 + 0.5)
    (said,) = [message for message in caplog.messages if message.startswith("data: ")]
    assert said.startswith(
        f"data: {sum(sizes):,} tokens in 10 documents; held out {sum(sizes[8:]):,} in 2 documents; "
        f"an epoch is {samples * 32:,} tokens; this run is {steps} steps of 128: {steps * 128:,} tokens, "
        f"{steps * 4 / samples:.3g} epochs, 0.031 a parameter"
    )
    assert [record["step"] for record in run.records] == list(range(1, steps + 1))
    assert run.column("epoch") == [step * 4 / samples for step in range(1, steps + 1)]
    assert run.records[-1]["lr"] == pytest.approx(1e-3), "the schedule ends with the run"
    saved = load_recipe(Path(run.folder) / "recipe.toml").train
    assert (saved.steps, saved.tokens, saved.epochs) == (steps, 0, 0.0)
    assert run.train("--train.epochs=0", f"--train.tokens={(steps + 2) * 128}") == 0  # goes on
    assert run.records[-1]["step"] == steps + 2
    with pytest.raises(RecipeError, match="profile.start_step . num_steps ends at step .*, after train.steps"):
        trainer.run(load_recipe(Path(run.folder) / "recipe.toml", ["--train.epochs=1", "--profile.start_step=90"]))


def test_a_metric_is_one_line(tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    toy = Metric("toy", "toy {:.1f}", lambda step: step.num_labels, "max")
    monkeypatch.setattr(table, "METRICS", (toy, *table.METRICS))
    run = tiny("--train.steps=2", "--metrics.tensorboard=true")
    assert run.train() == 0
    assert run.column("toy") == [128.0, 128.0] and list(run.records[0])[:3] == ["step", "toy", "loss"]
    assert capsys.readouterr().out.count("  toy 128.0  loss ") == 2
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("toy")] == [(1, 128.0), (2, 128.0)]


@pytest.mark.parametrize("fails", [False, True])
def test_trainer_releases_graphs_before_the_process_group(tiny, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    released = []

    def assembled(recipe: Recipe, device: torch.device) -> Assembly:
        assembly = assemble(recipe, device)
        assembly.step.release = lambda: released.append(dist.is_initialized())
        if fails:
            assembly.step.step.balancer = None  # the step ends in an error
        return assembly

    monkeypatch.setattr(trainer, "assemble", assembled)
    with pytest.raises(AttributeError) if fails else nullcontext():
        tiny("--train.steps=1").train()
    assert released == [True]
    assert gc.isenabled(), "a run collects garbage at its own steps, and only while it runs"


@pytest.mark.slow
def test_trainer_run_folder_repeats_the_run(tiny) -> None:
    run = tiny("--train.steps=3", "--run.device=auto" if not torch.cuda.is_available() else "--run.device=cpu")
    assert run.train("--optim.lr=3e-3", "--model.moe.top_k", "3") == 0
    recipe = load_recipe(run.folder / "recipe.toml", [])
    assert (recipe.optim.lr, recipe.model.moe.top_k, recipe.run.device) == (3e-3, 3, "cpu")
    assert (run.folder / "recipe.toml").read_text() == dump_recipe(recipe), "every field is written"
    environment = json.loads((run.folder / "environment.json").read_text())
    assert environment["torch"] == torch.__version__ and environment["world_size"] == 1
    before, rerun = run.trace, tiny()
    assert run.again(f"--run.folder={rerun.folder}") == 0
    assert rerun.trace == run.trace == before, "in another folder the recipe is a rerun"


@pytest.mark.slow
def test_trainer_keeps_the_model_and_says_how_it_ended(tiny, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="titan_moe")
    run = tiny("--train.steps=4", "--validation.every_steps=3", "--validation.num_sequences=4")
    assert run.train() == 0 and run.saved_steps == [4]
    loss, validation_loss = run.column("loss")[-1], run.column("validation_loss")[-1]
    finished, place = caplog.messages[-2:]
    expected = f"finished steps 1 to 4 in 0:0\\d:\\d\\d: loss {loss:.4f}, validation loss {validation_loss:.4f}"
    assert re.fullmatch(expected, finished)
    model = Path(place.removeprefix("the model is in "))
    assert model == run.folder / "checkpoints" / "step-4" and (model / ".metadata").exists()
    assert run.again("--train.steps=6") == 0
    assert caplog.messages[-2].startswith("finished steps 5 to 6 in ")
    assert tiny("--train.steps=1").train(f"--checkpoint.load_from={model}") == 0


@pytest.mark.slow
def test_trainer_without_a_last_save(tiny, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="titan_moe")
    run = tiny("--checkpoint.save_last_step=false", "--checkpoint.keep_latest=0")
    assert run.train("--train.steps=2") == 0 and run.saved_steps == []
    assert caplog.messages[-1] == "the model is not saved"
    assert run.train("--train.steps=5", "--checkpoint.every_steps=2") == 0 and run.saved_steps == [2, 4]


@pytest.mark.slow
def test_trainer_is_repeatable_by_seed(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in VARIABLES.items():  # so that what the mode sets does not stay
        monkeypatch.setenv(name, values[0])
    runs = [tiny("--train.steps=4") for _ in range(3)]
    for run, words in zip(runs, ([], ["--run.is_deterministic=true"], ["--run.seed=1"]), strict=True):
        assert run.train(*words) == 0
    assert runs[0].trace == runs[1].trace
    assert not set(runs[0].column("loss")) & set(runs[2].column("loss"))
    assert not torch.are_deterministic_algorithms_enabled(), "what a run switches on, it switches off"


@pytest.mark.slow
def test_trainer_losses_do_not_depend_on_microbatches(tiny) -> None:
    columns = []
    for size in (1, 2, 4):
        run = tiny("--train.steps=5", f"--train.micro_batch_sequences={size}")
        assert run.train() == 0
        columns.append([(record["loss"], record["grad_norm"], record["aux_loss"]) for record in run.records])
    torch.testing.assert_close(columns[1:], columns[:1] * 2, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("document_attention", ["false", "true"])
def test_trainer_validation_loss_equals_brute_force(tiny, text: str, document_attention: str) -> None:
    run = tiny(*TEXT, text, f"--data.document_attention={document_attention}", "--train.micro_batch_sequences=2")
    words = ("--train.steps=6", "--validation.every_steps=4", "--checkpoint.every_steps=4")
    folder = Path(text.partition("=")[2]).parent  # the held-out documents again, as data of a set
    sets = (f"--validation.sets.again={folder}/[89].txt", f"--validation.sets.first={folder}/0.txt")
    assert run.train(*words, "--validation.num_sequences=6", *sets) == 0
    assert [record["step"] for record in run.records if "validation_loss" in record] == [4, 6]

    model = runpy.run_path(str(EXAMPLE))["load_last"](run.folder)
    expected = brute_force_loss(model, text.partition("=")[2], 6, document_attention == "true")
    assert run.column("validation_loss")[-1] == pytest.approx(expected, rel=1e-5)
    assert run.column("validation_loss/again") == run.column("validation_loss") != run.column("validation_loss/first")


@torch.no_grad()
def brute_force_loss(model: Transformer, path: str, num_sequences: int, ends_matter: bool) -> float:
    """Split the last two documents into sequences and evaluate each document's part of a sequence alone."""
    files = sorted(Path(path).parent.iterdir())[-2:]
    documents = [file.read_bytes() + b"\0" for file in files]
    held_out, border = b"".join(documents), len(documents[0])
    count = (len(held_out) - 1) // 32
    starts = [number * count // num_sequences * 32 for number in range(num_sequences)]
    assert len(set(starts)) == num_sequences and any(start < border < start + 32 for start in starts)
    losses = []
    for start in starts:
        stops = [start, border, start + 32] if ends_matter and start < border < start + 32 else [start, start + 32]
        for first, last in zip(stops, stops[1:], strict=False):
            end = last if last == border and ends_matter else last + 1  # the next document's first byte is no label
            ids = torch.tensor(list(held_out[first:end]))
            logits = model(ids[None, : len(ids) - 1])[0]
            losses.append(F.cross_entropy(logits, ids[1:], reduction="none"))
    return torch.cat(losses).mean().item()


@pytest.mark.slow
def test_trainer_on_a_stream_validates_samples_and_resumes(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # of the process that reads the stream
    lines = (json.dumps({"text": f"document {number}: " + "abc " * (number % 7 + 9)}) for number in range(60))
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    files = ("--data.path=json", f"--data.files={tmp_path}/*.jsonl", "--data.is_streamed=true")
    source = ("--data.source=datasets", *files)
    held_out = ("--validation.every_steps=4", "--validation.num_sequences=4", "--metrics.sample_tokens=8")
    whole, parted = (tiny(*source, *held_out, "--model.vocab_size=256", "--optim.decay_steps=0") for _ in range(2))
    assert whole.train("--train.steps=8") == 0
    assert "--- held-out prompt ---\ndocument 0: abc abc" in capsys.readouterr().out
    assert len(whole.column("validation_loss")) == 2
    for steps in (4, 8):
        assert parted.train(f"--train.steps={steps}", "--checkpoint.every_steps=4") == 0
    assert parted.trace == whole.trace


@pytest.mark.slow
def test_trainer_with_document_attention_differs(tiny, text: str) -> None:
    traces = []
    for switch in ("false", "true"):
        run = tiny(*TEXT, text, "--train.steps=30", f"--data.document_attention={switch}")
        assert run.train("--data.is_shuffled=false") == 0
        traces.append(run.column("loss"))
    assert traces[1][-1] < traces[1][0] - 1
    assert traces[0] != traces[1]


def test_trainer_warns_of_data_that_is_not_read(tiny, caplog: pytest.LogCaptureFixture) -> None:
    assert tiny("--train.steps=1", "--data.path=corpus/*.py").train() == 0
    assert 'data.path = "corpus/*.py" is not read: data.source = "synthetic"' in caplog.messages


@pytest.mark.slow
def test_trainer_forced_balance_is_even_and_logged(
    tiny, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny("--train.steps=3", "--train.forced_load=balanced")
    assert run.train() == 0
    assert any("train.forced_load" in message for message in caplog.messages)
    assert "FORCED LOAD: BALANCED" in capsys.readouterr().out
    assert all(record["forced_load"] == "balanced" for record in run.records)
    assert run.column("expert_load") == [{ROUTER: 1.0}] * 3
    honest = tiny("--train.steps=3")
    assert honest.train() == 0
    assert honest.column("forced_load") == [] and honest.column("expert_load")[0][ROUTER] > 1


def test_trainer_forced_skew_is_constant_and_logged(tiny, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny("--train.steps=3", "--train.forced_load=skewed")
    assert run.train() == 0
    assert any("train.forced_load" in message for message in caplog.messages)
    assert all(record["forced_load"] == "skewed" for record in run.records)
    loads = [load[ROUTER] for load in run.column("expert_load")]
    assert loads == [loads[0]] * 3 and loads[0] == pytest.approx(1.8, rel=0.1), "a step is not whole windows"


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Profiler")
@pytest.mark.parametrize("start", [1, 3])
def test_trainer_writes_a_trace(tiny, caplog: pytest.LogCaptureFixture, start: int) -> None:
    run = tiny("--train.steps=5", f"--profile.start_step={start}", "--profile.num_steps=2")
    with caplog.at_level("INFO", "titan_moe"):
        assert run.train() == 0
    (file,) = (run.folder / "traces").iterdir()
    assert f"the trace is {file}" in caplog.text
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert {name for name in names if "ProfilerStep" in name} == {f"ProfilerStep#{start}", f"ProfilerStep#{start + 1}"}


def test_trainer_tensorboard_has_the_same_numbers(tiny) -> None:
    run = tiny("--train.steps=3", "--metrics.tensorboard=true", "--validation.every_steps=2")
    assert run.train() == 0
    curves = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    for name in ("loss", "validation_loss"):
        points = {point.step: point.value for point in curves.Scalars(name)}
        assert points == pytest.approx({record["step"]: record[name] for record in run.records if name in record})


@pytest.mark.slow
def test_trainer_sample_is_printed_and_repeatable(tiny, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny(*TEXT, text, "--train.steps=30", "--metrics.sample_tokens=40", "--optim.decay_steps=0")
    run.words.append("--checkpoint.save_last_step=false")

    def sample(*words: str) -> str:
        assert run.train(*words) == 0
        return capsys.readouterr().out.partition("--- held-out prompt ---\n")[2]

    first = sample()
    prompt, _, continuation = first.partition("\n--- the model continues ---\n")
    assert prompt == "".join(f"{word} {8 + word * word % 7}\n" for word in range(8))[:32]
    assert len(continuation.encode()) >= 20 and sum(letter.isdigit() for letter in continuation) > 5
    assert sample() == first
    assert sample("--metrics.sample_temperature=0") != first


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--model.class=nowhere:Model"], 'model.class = "nowhere:Model" cannot be imported: No module named'),
        (["--model.class=math:Model"], "has no attribute 'Model'"),
        ([*TEXT, "--data.path=nowhere/*"], "data.path = 'nowhere/*' matches no file"),
        (["--data.source=text", "--data.path=x", "--data.tokenizer=nowhere"], "is not a folder with a tokenizer.json"),
        (["--checkpoint.load_from=nowhere"], "checkpoint.load_from = 'nowhere' is not a complete checkpoint"),
    ],
)
def test_trainer_errors_name_what_is_missing(
    tiny, overrides: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny(*overrides)
    assert run.train() == 2
    error = capsys.readouterr().err
    assert error.startswith("titan-moe: 1 problem\n") and expected in error
    assert not (run.folder / "recipe.toml").exists()


def test_trainer_reports_all_problems_at_once(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny("--train.setps=5", "--optim.lr=fast", "--model.moe.top_k=9").train() == 2
    error = capsys.readouterr().err
    assert "2 problems" in error and "did you mean train.steps?" in error and "optim.lr" in error
    assert tiny("--model.moe.top_k=9", "--optim.beta1=2").train() == 2
    assert "2 problems" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_trainer_error_names_a_missing_gpu(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny("--run.device=cuda", "--precision.compute=bf16").train() == 2
    assert 'run.device = "cuda", but PyTorch finds no GPU' in capsys.readouterr().err


def test_trainer_logs_what_runs_first(tiny, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="titan_moe")
    run = tiny("--train.steps=1", "--model.name=small")
    assert run.train() == 0
    assert caplog.messages[0] == f"small: 28.96k parameters, 22.82k active a token; 1 x cpu; writing to {run.folder}"
