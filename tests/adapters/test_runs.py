"""Runs with adapters: they begin with a base, resume exactly, and end as a file or as merged weights."""

import shutil
from pathlib import Path

import pytest
import torch
from support.runs import one_process, tiny

from titan_moe import cli

__all__ = ["one_process", "tiny"]
ADAPTER = ("--model.adapter.rank=4", '--model.adapter.targets=["attention","dense","experts"]')
"""8 experts' ranks would be 16 bytes in fp32 too."""


def test_a_run_begins_with_a_base_and_resumes_exactly(tiny) -> None:
    base = tiny("--train.steps=1")
    assert base.train() == 0
    words = *ADAPTER, f"--checkpoint.load_from={base.folder / 'checkpoints' / 'step-1'}", "--train.steps=4"
    whole, part = tiny("--checkpoint.every_steps=2", *words), tiny(*words)
    assert whole.train() == 0
    assert whole.copy(part.folder, last_step=2).again() == 0
    before, after, resumed = base.checkpoint(1), whole.checkpoint(4), part.checkpoint(4)
    moments = {name.split("state.")[1].rpartition(".")[0] for name in after if name.endswith(".exp_avg")}
    assert moments and all(name.endswith(("adapter.A", "adapter.B", "_A", "_B")) for name in moments)
    assert {name for name, value in after.items() if name.endswith(".exp_avg") and not value.any()} == set()
    for name, value in after.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, resumed[name]), name
        if name in before and name.endswith(("weight", "gate_up", "down")):
            assert torch.equal(value, before[name]), name
    assert len(set(whole.column("loss"))) == 4


def test_a_run_ends_with_files_that_another_one_begins_with(tiny, tmp_path: Path) -> None:
    """PEFT's files, written at the end and from a checkpoint, and merged weights, written on both ways."""
    qwen = ("--model.moe.score_fn=softmax", "--model.moe.bias_update_speed=0", "--model.attention.qk_norm=true")
    qwen += ("--model.moe.aux_loss_coef=0", "--train.global_batch_sequences=2")
    base = tiny("--train.steps=1", *qwen)
    assert base.train() == 0
    origin = f"--checkpoint.load_from={base.folder / 'checkpoints' / 'step-1'}"
    ends = ("--checkpoint.export_adapter_at_end=true", "--checkpoint.export_hf_at_end=true")
    first = tiny("--train.steps=3", *qwen, *ADAPTER, origin, *ends)
    assert first.train() == 0
    adapter, checkpoint = first.folder / "adapter" / "step-3", first.folder / "checkpoints" / "step-3"
    assert cli.main(["export", str(checkpoint), str(tmp_path / "adapter"), "--adapter"]) == 0
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (adapter / file).read_bytes() == (tmp_path / "adapter" / file).read_bytes()
    assert cli.main(["export", str(checkpoint), str(tmp_path / "merged"), "--dtype=bf16"]) == 0
    (at_end,), (later,) = (
        folder.glob("*.safetensors") for folder in (first.folder / "hf" / "step-3", tmp_path / "merged")
    )
    assert at_end.read_bytes() == later.read_bytes()
    assert cli.main(["export", str(base.folder / "checkpoints" / "step-1"), str(tmp_path / "none"), "--adapter"]) == 2
    words = ("--train.steps=1", *qwen, *ADAPTER)
    from_files = tiny(*words, origin, f"--checkpoint.load_adapter={adapter}")
    from_checkpoint = tiny(*words, f"--checkpoint.load_from={checkpoint}")
    assert from_files.train() == 0 and from_checkpoint.train() == 0
    assert from_files.trace == from_checkpoint.trace
    assert from_files.column("loss") != base.column("loss")


def test_a_checkpoint_may_lack_the_base(tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It has the adapter with its moments; a resume reads the base again, exactly, wherever it lies."""
    base = tiny("--train.steps=1")
    assert base.train() == 0
    words = *ADAPTER, f"--checkpoint.load_from={base.folder / 'checkpoints' / 'step-1'}", "--train.steps=4"
    whole, light, part = tiny(*words), *(tiny("--checkpoint.saves_frozen=false", *words) for _ in range(2))
    assert whole.train() == 0 and light.train("--checkpoint.every_steps=2") == 0
    assert light.copy(part.folder, last_step=2).again() == 0
    complete, resumed = whole.checkpoint(4), part.checkpoint(4)
    assert {name for name in complete.keys() - resumed.keys() if "state." in name} == set()
    assert "/embed.weight" not in resumed and "/layers.1.feed_forward.experts.gate_up_A" in resumed
    for name, value in resumed.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, complete[name]), name
    folder = str(light.folder / "checkpoints" / "step-4")
    capfd.readouterr()
    assert cli.main(["export", folder, str(tmp_path / "merged")]) == 2
    assert cli.main(["average", folder, folder, str(tmp_path / "mean")]) == 2
    origin, told = str(base.folder / "checkpoints" / "step-1"), capfd.readouterr().err
    assert (
        told.count(
            f"it has no frozen weights (checkpoint.saves_frozen = false): they are those of its base, check"
            f"point.load_from = '{origin}'"
        )
        == 3
        and "--adapter writes the adapter alone" in told
    )
    assert cli.main(["export", str(light.folder), str(tmp_path / "adapter"), "--adapter"]) == 0
    capfd.readouterr()
    for each in (folder, str(whole.folder)):
        assert cli.main(["evaluate", each, "--run.device=cpu", "--data.source=synthetic"]) == 0
    light_loss, whole_loss = (line for line in capfd.readouterr().out.splitlines() if line.startswith("data"))
    assert light_loss == whole_loss, "the base is read beside it"
    other = tmp_path / "other"
    shutil.copytree(base.folder / "checkpoints" / "step-1", other)
    assert part.again(f"--checkpoint.load_from={other}", "--train.steps=5") == 0
    weights = next(other.glob("*.distcp"))
    weights.write_bytes(bytes([255 - weights.read_bytes()[0]]) + weights.read_bytes()[1:])
    assert part.again(f"--checkpoint.load_from={other}", "--train.steps=6") == 2
    assert cli.main(["evaluate", str(part.folder), "--run.device=cpu", "--data.source=synthetic"]) == 2
    told = capfd.readouterr().err
    assert "which has its frozen weights, was 1 files" in told
    assert f"its base, checkpoint.load_from = '{other}', which was 1 files" in told
