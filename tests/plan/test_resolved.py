"""What follows from a recipe is derived once."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from titan_moe.config import load_recipe
from titan_moe.plan import resolved as of_resolved
from titan_moe.plan.check_report import describe
from titan_moe.plan.resolved import Resolved

QWEN3 = Path(__file__).parents[2] / "recipes" / "qwen3_30b_a3b.toml"
INTERLEAVED = ("--parallel.overlap=microbatch", "--parallel.dispatcher=alltoall", "--perf.kernels=fused")
ZBV = ("--parallel.pp=2", "--parallel.vpp=2", "--parallel.pp_schedule=zbv", "--parallel.overlap=none")


@pytest.mark.parametrize(
    ("words", "waits"),
    [
        ((), True),
        (("--parallel.overlap=none",), False),
        (("--perf.kernels=grouped_mm",), False),
        (("--memory.recompute=experts",), False),
    ],
)
def test_weight_grads_of_experts_wait_where_autograd_fixes_no_order(words: tuple[str, ...], waits: bool) -> None:
    recipe = load_recipe(QWEN3, [*INTERLEAVED, *words])
    assert Resolved(recipe, 8).delays_weight_grads_of_experts == waits


@pytest.mark.parametrize(
    ("words", "splits"),
    [
        ((), True),
        (("--parallel.pp_schedule=interleaved_1f1b",), False),
        (("--parallel.pp=1", "--parallel.vpp=1"), False),
    ],
)
def test_some_schedules_split_backwards(words: tuple[str, ...], splits: bool) -> None:
    assert Resolved(load_recipe(QWEN3, [*ZBV, *words]), 16).splits_backward == splits


def test_a_value_is_derived_once_and_anew_for_another_recipe() -> None:
    resolved = Resolved(load_recipe(QWEN3, ZBV), 16)
    with mock.patch.object(of_resolved, "parts_of", wraps=of_resolved.parts_of) as derived:
        assert resolved.state_bytes < resolved.peak_bytes(1.125) and len(resolved.parts) == 2
        assert derived.call_count == 1
        other = replace(resolved, recipe=load_recipe(QWEN3))
        assert len(other.parts) == 1 and derived.call_count == 2


def test_check_reads_the_value_of_a_run() -> None:
    recipe = load_recipe(QWEN3, ["--parallel.dispatcher=symm_mem", "--parallel.expert_clones=off"])
    resolved = Resolved(recipe, 16)
    assert f"dp_shard {resolved.sizes.dp_shard}" in describe(recipe, 16)
    assert f"microbatches {resolved.num_microbatches} " in describe(recipe, 16)
