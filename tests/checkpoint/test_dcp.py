"""Checkpoints resume a run exactly: on more or fewer ranks, and after a kill in the middle of a save."""

import hashlib
import json
import math
import os
import pickle
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import checkpoint_case
from support.runs import start
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from titan_moe.checkpoint import storage
from titan_moe.checkpoint.manifest import MANIFEST_FILE, FileHash, read_manifest
from titan_moe.checkpoint.read import CheckpointMismatch
from titan_moe.config import RecipeError
from titan_moe.config.train import CheckpointConfig, OptimConfig

pytestmark = pytest.mark.slow

SCRIPT = f"""
import sys, torch
import torch.distributed as dist
sys.path.insert(0, {str(Path(checkpoint_case.__file__).parents[1])!r})
from support.checkpoint_case import run_phases
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
run_phases(*sys.argv[1:])
dist.destroy_process_group()
"""


def launch(folder: Path, phase: str) -> int:
    """Run in a process of its own, which may die. Returns its exit code."""
    return start([str(folder), phase], SCRIPT).wait(240)


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks_folder(ranks, tmp_path_factory) -> Path:
    """The files of two ranks: an uninterrupted run with a checkpoint at step 3, and one with an asynchronous save."""
    folder = tmp_path_factory.mktemp("two_ranks")
    ranks(2, checkpoint_case.run_phases, str(folder), "straight", "background")
    return folder


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong


def snapshot(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"{name}.pt")


class Command:
    """An object whose pickle runs a command when it is loaded: it makes a file."""

    def __init__(self, makes: Path) -> None:
        self.makes = makes

    def __reduce__(self):
        return os.system, (f"touch {self.makes}",)


class Careless(DefaultSavePlanner):
    """Saves whatever it is given."""

    def files(self, plan):
        return [plan]


def saved(folder: Path, *steps: int) -> checkpoint_case.CheckpointCase:
    """A run with checkpoints of these steps."""
    run = checkpoint_case.CheckpointCase(folder, CheckpointConfig())
    for step in steps or (1,):
        run.train()
        run.checkpointer.save(step)
    return run


def seal_again(folder: Path) -> None:
    """Make the manifest fit the files of a checkpoint, as an attacker would."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST_FILE}
    hashes = {name: FileHash(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    manifest = read_manifest(folder)
    assert manifest is not None
    replace(manifest, files=hashes).write(folder)


def test_checkpoint_resumes_on_another_number_of_ranks(one_rank, ranks, two_ranks_folder):
    run = checkpoint_case.CheckpointCase(two_ranks_folder / "run", CheckpointConfig())
    assert run.checkpointer.load()
    assert_equal(run.snapshot(), snapshot(two_ranks_folder, "at_3"))
    seen = run.train(3)
    assert seen == json.loads((two_ranks_folder / "seen.json").read_text())[6:12]
    run.checkpointer.save(6)
    at_6 = run.snapshot()
    run.checkpointer.close()

    ranks(2, checkpoint_case.run_phases, str(two_ranks_folder), "resume")
    assert_equal(snapshot(two_ranks_folder, "resumed"), at_6)
    found, expected = snapshot(two_ranks_folder, "resumed_at_end"), snapshot(two_ranks_folder, "at_end")
    for name in expected:  # steps 4 to 6 ran on other shard sizes: the fused AdamW rounds a vector's tail differently
        torch.testing.assert_close(found[name], expected[name], rtol=1e-13, atol=1e-13)


def test_checkpoint_resumes_bit_for_bit_on_equal_ranks(one_rank, tmp_path):
    straight = checkpoint_case.CheckpointCase(tmp_path, CheckpointConfig())
    straight.train(3)
    straight.checkpointer.save(3)
    expected_seen, expected = straight.train(5), straight.snapshot()
    straight.checkpointer.close()
    resumed = checkpoint_case.CheckpointCase(tmp_path, CheckpointConfig())
    torch.manual_seed(1234)
    assert resumed.checkpointer.load()
    assert resumed.train(5) == expected_seen
    assert_equal(resumed.snapshot(), expected)
    resumed.checkpointer.close()


def test_checkpoint_async_save_keeps_the_values_of_its_step(one_rank, two_ranks_folder):
    for rank in range(2):  # training went on before the save was done
        assert json.loads((two_ranks_folder / f"complete_while_saving.{rank}.json").read_text()) == []
    run = checkpoint_case.CheckpointCase(two_ranks_folder / "background", CheckpointConfig(is_async=True))
    assert run.checkpointer.load()
    assert_equal(run.snapshot(), snapshot(two_ranks_folder, "background_at_2"))
    run.checkpointer.close()


@pytest.mark.parametrize(
    ("phase", "leaves_manifest"),
    [("die_before_metadata", False), ("die_before_manifest", False), ("die_after_manifest", True)],
)
def test_checkpoint_killed_save_is_removed(one_rank, tmp_path, phase, leaves_manifest):
    assert launch(tmp_path, phase) == -9
    folder = tmp_path / "killed" / "checkpoints"
    assert list((folder / "step-4").glob("*.distcp")) and not (folder / "step-4" / ".metadata").exists()
    assert (folder / "step-4" / MANIFEST_FILE).exists() == leaves_manifest
    run = checkpoint_case.CheckpointCase(tmp_path / "killed", CheckpointConfig())
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-3"]
    assert run.checkpointer.load()
    assert_equal(run.snapshot(), snapshot(tmp_path, "killed_at_3"))
    run.checkpointer.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_checkpoint_keeps_the_newest(one_rank, tmp_path, is_async):
    run = checkpoint_case.CheckpointCase(tmp_path, CheckpointConfig(keep_latest=2, is_async=is_async))
    for step in range(1, 6):
        run.train()
        run.checkpointer.save(step, is_last=step == 5)
        assert len(run.checkpointer.folders.complete_steps()) >= min(step - 1, 2)
    assert run.checkpointer.folders.complete_steps() == [4, 5]
    run.checkpointer.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_checkpoint_keeps_the_best_and_every_fourth(one_rank, tmp_path, is_async):
    """Also one from before a resume, and none without a loss, or with one that is no number."""
    config = CheckpointConfig(keep_latest=2, keep_best=True, keep_every_steps=4, is_async=is_async)
    losses = {1: 2.5, 2: 2.0, 3: math.nan, 4: None, 5: 2.0, 6: 2.25, 7: 2.125, 8: 1.5, 9: 1.75, 10: 1.5}
    run, kept = checkpoint_case.CheckpointCase(tmp_path, config), {}
    for step, loss in losses.items():
        if step == 6:
            run.checkpointer.close()
            run = checkpoint_case.CheckpointCase(tmp_path, config)
            assert run.checkpointer.load()
        run.train()
        run.checkpointer.save(step, is_last=step in (5, 10), validation_loss=loss)
        kept[step] = run.checkpointer.folders.complete_steps()
    assert kept[5] == [2, 4, 5] and kept[10] == [4, 8, 9, 10]
    run.checkpointer.close()


def test_checkpoint_incomplete_folders_are_not_counted_as_kept(one_rank, tmp_path):
    run = checkpoint_case.CheckpointCase(tmp_path, CheckpointConfig(keep_latest=2))
    for step in (1, 2):
        run.train()
        run.checkpointer.save(step)
    for step in (3, 4, 5):
        run.checkpointer.folders.path(step).mkdir()
    run.checkpointer.folders.keep_newest(2)
    assert run.checkpointer.folders.complete_steps() == [1, 2]
    run.checkpointer.close()


def test_checkpoint_saved_step_is_not_written_again(one_rank, tmp_path):
    run = checkpoint_case.CheckpointCase(tmp_path, CheckpointConfig())
    run.train()
    run.checkpointer.save(1)
    before = {path.name: path.stat().st_mtime_ns for path in run.checkpointer.folders.path(1).iterdir()}
    run.checkpointer.save(1, is_last=True)
    assert {path.name: path.stat().st_mtime_ns for path in run.checkpointer.folders.path(1).iterdir()} == before
    run.checkpointer.close()


def test_checkpoint_load_and_save_before_the_first_step_do_nothing(one_rank, tmp_path):
    run = checkpoint_case.CheckpointCase(tmp_path, CheckpointConfig())
    before = run.snapshot()
    assert not run.checkpointer.load()
    run.checkpointer.save(0, is_last=True)
    assert run.checkpointer.folders.complete_steps() == []
    assert_equal(run.snapshot(), before)
    run.checkpointer.close()


def test_checkpoint_load_from_loads_only_weights(one_rank, tmp_path):
    source = checkpoint_case.CheckpointCase(tmp_path / "source", CheckpointConfig())
    source.train(2)
    source.checkpointer.save(2)
    source.checkpointer.close()
    config = CheckpointConfig(load_from=str(source.checkpointer.folders.path(2)))
    run = checkpoint_case.CheckpointCase(tmp_path / "run", config)
    untouched = run.snapshot()
    assert run.checkpointer.load()
    expected = {n: v if n.startswith("model.") else untouched[n] for n, v in source.snapshot().items()}
    assert_equal(run.snapshot(), expected)
    assert run.schedules.lr == pytest.approx(0.1 / 3)
    run.checkpointer.close()


def test_checkpoint_load_from_error_lists_complete_checkpoints(one_rank, tmp_path):
    source = checkpoint_case.CheckpointCase(tmp_path / "source", CheckpointConfig())
    source.train()
    source.checkpointer.save(1)
    source.checkpointer.close()
    run = checkpoint_case.CheckpointCase(tmp_path / "run", CheckpointConfig(load_from=str(tmp_path / "source")))
    with pytest.raises(ValueError, match=r"checkpoint\.load_from = .*complete ones below it: checkpoints/step-1\)"):
        run.checkpointer.load()
    run.checkpointer.close()


def test_checkpoint_of_another_model_is_refused(one_rank, tmp_path):
    run = checkpoint_case.CheckpointCase(tmp_path, CheckpointConfig())
    run.train()
    run.checkpointer.save(1)
    run.checkpointer.close()
    other = checkpoint_case.CheckpointCase(tmp_path, CheckpointConfig())
    other.model.register_buffer("added", torch.zeros(1))
    other.model.expert_bias_E = torch.zeros(7)
    differences = r"only in the model: added; other shapes: expert_bias_E \(7,\) \(checkpoint \(4,\)\)"
    with pytest.raises(RuntimeError, match=f"does not fit this run's model: {differences}; .*another run.folder"):
        other.checkpointer.load()
    other.checkpointer.close()


def test_checkpoint_with_an_unexpected_weight_is_refused(one_rank, tmp_path):
    run = checkpoint_case.CheckpointCase(tmp_path / "run", CheckpointConfig())
    run.model.register_buffer("removed", torch.zeros(1))
    run.train()
    run.checkpointer.save(1)
    run.checkpointer.close()
    saved = str(run.checkpointer.folders.path(1))
    for folder, config in (("run", CheckpointConfig()), ("other", CheckpointConfig(load_from=saved))):
        smaller = checkpoint_case.CheckpointCase(tmp_path / folder, config)
        with pytest.raises(CheckpointMismatch, match=r"only in the checkpoint: removed; (restore|correct)"):
            smaller.checkpointer.load()
        smaller.checkpointer.close()


def test_checkpoint_damaged_is_refused(one_rank, tmp_path):
    run = checkpoint_case.CheckpointCase(tmp_path, CheckpointConfig())
    for step in (1, 2):
        run.train()
        run.checkpointer.save(step)
    (data,) = run.checkpointer.folders.path(2).glob("*.distcp")
    data.write_bytes(b"")
    with pytest.raises(CheckpointMismatch, match=r"is damaged: __0_0.distcp has 0 bytes .*or remove it: step-1 exists"):
        run.checkpointer.load()
    data.unlink()
    with pytest.raises(CheckpointMismatch, match=r"is damaged: __0_0.distcp cannot be read: No such file"):
        run.checkpointer.load()
    run.checkpointer.close()


def test_checkpoint_without_a_manifest_is_loaded_with_a_warning(one_rank, tmp_path, caplog):
    """As those of earlier versions."""
    run = saved(tmp_path, 1, 2)
    expected, folder = run.snapshot(), run.checkpointer.folders.path(2)
    (folder / MANIFEST_FILE).unlink()
    run.train()
    assert run.checkpointer.load()
    assert_equal(run.snapshot(), expected)
    assert f"{folder} has no manifest" in caplog.text
    (data,) = folder.glob("*.distcp")
    data.write_bytes(b"")
    with pytest.raises(CheckpointMismatch, match=r"or is damaged: \S.*; .*or remove it: step-1 exists"):
        run.checkpointer.load()
    (folder / ".metadata").write_bytes(b"junk")
    with pytest.raises(CheckpointMismatch, match=r"cannot be read: .metadata: \S"):
        run.checkpointer.load()
    run.checkpointer.close()


def test_checkpoint_manifest_has_the_hash_of_every_file(two_ranks_folder):
    for folder in (two_ranks_folder / "run" / "checkpoints/step-3", two_ranks_folder / "background/checkpoints/step-2"):
        manifest = read_manifest(folder)
        assert manifest is not None and manifest.data == "100 tokens" and manifest.recipe["optim.warmup_steps"] == 3
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST_FILE}
        assert files.keys() == {".metadata", "__0_0.distcp", "__1_0.distcp"}
        expected = {name: FileHash(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
        assert manifest.files == expected


@pytest.mark.parametrize("field", ["resume", "load_from"])
def test_checkpoint_with_a_flipped_bit_is_refused_by_name(one_rank, two_ranks_folder, tmp_path, field):
    rng = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    folder = tmp_path / "run" / "checkpoints" / "step-3"
    shutil.copytree(two_ranks_folder / "run" / "checkpoints" / "step-3", folder)
    config = CheckpointConfig() if field == "resume" else CheckpointConfig(load_from=str(folder))
    run = checkpoint_case.CheckpointCase(tmp_path / ("run" if field == "resume" else "other"), config)
    before = run.snapshot()
    files = sorted(folder.iterdir())
    assert len(files) == 4
    for file in files * 15:
        data = bytearray(file.read_bytes())
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        whole = file.read_bytes()
        file.write_bytes(data)
        with pytest.raises(CheckpointMismatch, match=rf"step-3 is damaged: {re.escape(file.name)} .*restore it"):
            run.checkpointer.load()
        file.write_bytes(whole)
    assert_equal(run.snapshot(), before)
    assert run.checkpointer.load()
    run.checkpointer.close()


def load_on_a_rank(folder: str) -> str:
    run = checkpoint_case.CheckpointCase(Path(folder), CheckpointConfig())
    try:
        run.checkpointer.load()
    except CheckpointMismatch as error:
        return str(error)
    finally:
        run.checkpointer.close()
    return ""


def test_checkpoint_damage_is_known_to_all_ranks(ranks, two_ranks_folder, tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "step-3"
    shutil.copytree(two_ranks_folder / "run" / "checkpoints" / "step-3", folder)
    assert ranks(2, load_on_a_rank, str(tmp_path / "run")) == ["", ""]
    file = folder / "__1_0.distcp"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    said = ranks(2, load_on_a_rank, str(tmp_path / "run"))
    assert said[0] == said[1] and "is damaged: __1_0.distcp is not as it was written" in said[0]


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("field", ["resume", "load_from"])
def test_checkpoint_with_crafted_metadata_runs_nothing(one_rank, tmp_path, field, has_manifest):
    source = saved(tmp_path / "source")
    source.checkpointer.close()
    folder = source.checkpointer.folders.path(1)
    (folder / ".metadata").write_bytes(pickle.dumps(Command(tmp_path / "made")))
    if has_manifest:
        seal_again(folder)
    else:
        (folder / MANIFEST_FILE).unlink()
    config = CheckpointConfig() if field == "resume" else CheckpointConfig(load_from=str(folder))
    run = checkpoint_case.CheckpointCase(tmp_path / ("source" if field == "resume" else "run"), config)
    with pytest.raises(
        CheckpointMismatch, match=r"cannot be read: .metadata: it names posix.system, which is not data"
    ):
        run.checkpointer.load()
    assert not (tmp_path / "made").exists()
    run.checkpointer.close()


def test_checkpoint_with_a_crafted_value_or_tensor_runs_nothing(one_rank, tmp_path, monkeypatch):
    run = saved(tmp_path)
    run.loader.state["order"] = Command(tmp_path / "made")
    with pytest.raises(CheckpointException, match="dataloader.order names posix.system, which is not data"):
        run.checkpointer.save(2)
    assert run.checkpointer.folders.complete_steps() == [1]
    with monkeypatch.context() as careless:
        careless.setattr(storage, "PlainSavePlanner", Careless)
        run.checkpointer.save(3)
    with pytest.raises(CheckpointMismatch, match=r"__0_0.distcp: dataloader.order names posix.system, .*step-1"):
        run.checkpointer.load()
    run.loader.state["order"] = "first"
    with monkeypatch.context() as careless:
        careless.setattr(storage, "PlainSavePlanner", Careless)
        save = torch.save
        crafted = lambda value: Command(tmp_path / "made") if isinstance(value, torch.Tensor) else value  # noqa: E731
        careless.setattr(torch, "save", lambda value, file: save(crafted(value), file))
        run.checkpointer.save(4)
    with pytest.raises(CheckpointMismatch, match=r"__0_0.distcp: a tensor names posix.system, which is not data"):
        run.checkpointer.load()
    assert not (tmp_path / "made").exists()
    run.checkpointer.close()


def test_checkpoint_of_other_data_is_refused(one_rank, tmp_path, monkeypatch):
    run = saved(tmp_path)
    run.checkpointer.close()
    other = checkpoint_case.CheckpointCase(tmp_path, CheckpointConfig())
    monkeypatch.setattr(other.loader, "fingerprint", lambda: "99 tokens")
    data = replace(other.checkpointer.recipe.data, tokenizer="elsewhere")
    other.checkpointer.recipe = replace(other.checkpointer.recipe, data=data)
    with pytest.raises(RecipeError, match="the data differs .*it was 100 tokens, it is 99 tokens; restore it, or") as e:
        other.checkpointer.load()
    assert e.value.problems[1:] == ['it may differ because of data.tokenizer = "elsewhere" (was "bytes"): set it back']
    other.checkpointer.close()


def test_checkpoint_resume_uses_optimizer_settings_of_the_recipe(one_rank, tmp_path):
    run = checkpoint_case.CheckpointCase(tmp_path, CheckpointConfig())
    run.train(4)
    run.checkpointer.save(4)
    run.checkpointer.close()
    resumed = checkpoint_case.CheckpointCase(
        tmp_path, CheckpointConfig(), OptimConfig(lr=0.02, weight_decay=0.3, beta2=0.9)
    )
    assert resumed.checkpointer.load()
    groups = [group for optimizer in resumed.optimizers for group in optimizer.param_groups]
    assert {(group["lr"], group["betas"]) for group in groups} == {(0.02, (0.9, 0.9))}
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    resumed.train()
    assert resumed.schedules.lr == 0.02
    resumed.checkpointer.close()
