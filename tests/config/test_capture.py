"""What CUDA graphs cannot capture is named, with a way out."""

from pathlib import Path

import pytest

from titan_moe.config import load_recipe
from titan_moe.config.rules.capture import step_can_be_captured

MOE = ["--model.moe.num_experts=4", "--model.moe.ffn_hidden_size=64", "--run.device=cuda"]


def found(tmp_path: Path, *overrides: str) -> list[str]:
    file = tmp_path / "recipe.toml"
    file.write_text("")
    return list(step_can_be_captured.check(load_recipe(file, [*MOE, *overrides]), 4))


@pytest.mark.parametrize("dispatcher", ["local", "allgather"])
def test_capture_of_dispatchers_without_host_reads(tmp_path: Path, dispatcher: str) -> None:
    assert found(tmp_path, f"--parallel.dispatcher={dispatcher}") == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--run.device=cpu", "no CUDA graphs"),
        ("--parallel.dispatcher=alltoall", "reads the counts"),
        ("--perf.kernels=reference", "read their offsets"),
        ("--parallel.cp=2 --parallel.cp_kind=ring", "not been tested in a capture"),
        (
            "--model.moe.aux_losses.global_batch=0.1 --train.global_batch_sequences=640 --parallel.ep=2 "
            "--parallel.dispatcher=symm_mem",
            "counts the microbatches",
        ),
        (
            "--parallel.ep=2 --parallel.dispatcher=symm_mem --model.moe.aux_losses.global_batch=0.1 "
            "--model.mtp.num_depths=2 --model.mtp.repeats_layer=true",
            "counts the microbatches",
        ),
        ("--perf.override.experts=reference", "read their offsets"),
        ("--model.class=mine:Model --memory.recompute=block", "may draw random numbers"),
    ],
)
def test_capture_obstacles_are_named(tmp_path: Path, override: str, expected: str) -> None:
    (obstacle,) = found(tmp_path, *override.split())
    assert expected in obstacle


def test_capture_of_a_dense_model_ignores_the_dispatcher(tmp_path: Path) -> None:
    assert found(tmp_path, "--model.moe.num_experts=0", "--parallel.dispatcher=alltoall") == []
