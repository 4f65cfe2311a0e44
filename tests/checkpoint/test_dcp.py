"""Checkpoints resume a run exactly: on more or fewer ranks, and after a kill in the middle of a save."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import checkpoint_case

from titan_moe.checkpoint.dcp import CheckpointMismatch
from titan_moe.config.train import CheckpointConfig, OptimConfig

pytestmark = pytest.mark.slow

SCRIPT = Path(checkpoint_case.__file__)


def launch(num_ranks: int, folder: Path, *phases: str) -> list[int]:
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "STORE": str(folder / f"store-{'-'.join(phases)}"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(SCRIPT), str(folder), *phases]
    paths = {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")])}
    processes = [
        subprocess.Popen(command, env=os.environ | paths | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_ranks)
    ]
    try:
        return [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks_folder(tmp_path_factory) -> Path:
    """The files of two ranks: an uninterrupted run with a checkpoint at step 3, and one with an asynchronous save."""
    folder = tmp_path_factory.mktemp("two_ranks")
    assert launch(2, folder, "straight", "background") == [0, 0]
    return folder


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong


def snapshot(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"{name}.pt")


def test_checkpoint_resumes_on_another_number_of_ranks(one_rank, two_ranks_folder):
    run = checkpoint_case.CheckpointCase(two_ranks_folder / "run", CheckpointConfig())
    assert run.checkpointer.load()
    assert_equal(run.snapshot(), snapshot(two_ranks_folder, "at_3"))
    seen = run.train(3)
    assert seen == json.loads((two_ranks_folder / "seen.json").read_text())[6:12]
    run.checkpointer.save(6)
    at_6 = run.snapshot()
    run.checkpointer.close()

    assert launch(2, two_ranks_folder, "resume") == [0, 0]
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


def test_checkpoint_killed_save_is_removed(one_rank, tmp_path):
    assert launch(1, tmp_path, "die_while_saving") == [-9]
    folder = tmp_path / "killed" / "checkpoints"
    assert list((folder / "step-4").glob("*.distcp")) and not (folder / "step-4" / ".metadata").exists()
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
    with pytest.raises(ValueError, match=r"checkpoint\.load_from = .*complete ones below it: step-1"):
        run.checkpointer.load()
    run.checkpointer.close()


def test_checkpoint_of_another_model_is_refused(one_rank, tmp_path):
    run = checkpoint_case.CheckpointCase(tmp_path, CheckpointConfig())
    run.train()
    run.checkpointer.save(1)
    run.checkpointer.close()
    other = checkpoint_case.CheckpointCase(tmp_path, CheckpointConfig())
    other.model.register_buffer("added", torch.zeros(1))
    with pytest.raises(RuntimeError, match="does not fit.*added.*another run.folder"):
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
        with pytest.raises(CheckpointMismatch, match=r"lacks 1 of its tensors \(removed\); (restore|correct)"):
            smaller.checkpointer.load()
        smaller.checkpointer.close()


def test_checkpoint_damaged_is_refused(one_rank, tmp_path):
    run = checkpoint_case.CheckpointCase(tmp_path, CheckpointConfig())
    for step in (1, 2):
        run.train()
        run.checkpointer.save(step)
    (data,) = run.checkpointer.folders.path(2).glob("*.distcp")
    data.write_bytes(b"")
    with pytest.raises(CheckpointMismatch, match=r"or is damaged: \S.*; .*remove it if it is damaged: step-1 exists"):
        run.checkpointer.load()
    (run.checkpointer.folders.path(2) / ".metadata").write_bytes(b"junk")
    with pytest.raises(CheckpointMismatch, match=r"cannot be read: .metadata: \S"):
        run.checkpointer.load()
    run.checkpointer.close()


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
