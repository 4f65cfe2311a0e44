"""What `parallel.expert_clones = "auto"` means."""

from pathlib import Path

import pytest

from titan_moe.config import load_recipe
from titan_moe.config.clones import num_clones, resolve_clones, why_no_clones
from titan_moe.config.parallel import NUM_CLONES
from titan_moe.plan.check_report import describe

RECIPES = Path(__file__).parents[2] / "recipes"
FP32 = "--precision.master=fp32"


@pytest.mark.parametrize(
    ("name", "overrides", "world_size", "expected"),
    [
        ("qwen3_30b_a3b", (), 8, NUM_CLONES),
        ("deepseek_v2_lite", (), 8, 0),  # split masters
        ("deepseek_v2_lite", (FP32,), 8, NUM_CLONES),
        ("mixtral_8x7b", (FP32,), 8, 1),  # a rank owns one expert
        ("mixtral_8x7b", (FP32, "--parallel.ep=4"), 4, 1),  # two
        ("mixtral_8x7b", (FP32, "--train.seq_len_tokens=2048"), 8, 0),  # few slots
        ("quickstart", (), 1, 0),
        ("qwen3_30b_a3b", ("--parallel.expert_clones=off",), 8, 0),
        ("qwen3_30b_a3b", ("--model.moe.num_experts=8",), 8, 1),  # as many as a rank owns
        ("qwen3_30b_a3b", ("--parallel.dispatcher=alltoall", "--parallel.overlap=none"), 8, 0),
        ("qwen3_30b_a3b", ("--train.micro_batch_sequences=1",), 8, 0),  # small experts
        ("qwen3_30b_a3b", ("--parallel.ep=4",), 8, 0),  # experts are sharded
        ("qwen3_30b_a3b", ("--precision.master=bf16", "--precision.reduce=bf16"), 8, 0),  # no copy for compute
        ("qwen3_30b_a3b", ("--memory.recompute=block",), 8, 0),
    ],
)
def test_auto_takes_clones_where_they_pay(
    name: str, overrides: tuple[str, ...], world_size: int, expected: int
) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml", ["--parallel.expert_clones=auto", *overrides])
    resolved = resolve_clones(recipe, world_size)
    assert num_clones(resolved) == expected
    assert resolve_clones(resolved, world_size) == resolved
    if recipe.parallel.has_clones:
        assert resolved.parallel.expert_clones == ("auto" if expected else "off"), "the run folder's recipe is auto too"
        assert bool(why_no_clones(recipe, world_size)) == (not expected)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("--parallel.dispatcher=alltoall --parallel.overlap=none", 'dispatcher = "alltoall" would send the weights'),
        ("--parallel.ep=1 --parallel.dispatcher=local --parallel.overlap=none", "no experts are on other ranks"),
        ("--train.micro_batch_sequences=1", "a rank's experts compute 0.93 TFLOP for a microbatch in a layer"),
        (
            "--train.micro_batch_sequences=1 --train.seq_len_tokens=512",
            "a microbatch has 4,096 expert slots a rank",
        ),
        ("--parallel.ep=4", "experts are sharded"),
        ("--precision.master=bf16 --precision.reduce=bf16", "parameters are in precision.compute"),
        ("--parallel.pp=2 --parallel.ep=4", "microbatches in flight share the copies"),
        ("--memory.recompute=block", "recomputation would fetch the weights of clones again"),
        (
            "--precision.experts=fp8_rowwise --train.micro_batch_sequences=2",
            "a rank's experts compute 1.9 TFLOP for a microbatch in a layer, and clones may pay from 2.8 on",
        ),
        ("--parallel.expert_rank_capacity_factor=0", "without a capacity bound the host reads nothing after a step"),
    ],
)
def test_check_says_why_auto_means_no_clones(override: str, reason: str) -> None:
    recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml", ["--parallel.expert_clones=auto", *override.split()])
    (line,) = [line for line in describe(recipe, 8).splitlines() if line.startswith("clones")]
    assert line.startswith(f'clones      "auto" means "off": {reason}')


def test_check_says_what_replica_slots_take() -> None:
    recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml", ["--parallel.expert_clones=auto"])
    slots = NUM_CLONES * recipe.model.num_moe_layers * 3 * recipe.model.hidden_size * recipe.model.moe.ffn_hidden_size
    (line,) = [line for line in describe(recipe, 8).splitlines() if line.startswith("clones")]
    assert f"; {2 * slots / 2**30:.3g} GiB a rank, used or not" in line
    without = load_recipe(RECIPES / "qwen3_30b_a3b.toml", ["--parallel.expert_clones=off"])
    assert "\nclones" not in describe(without, 8)


@pytest.mark.parametrize(
    ("name", "experts", "pays_from"),
    [("qwen3_30b_a3b", "format", "1.11"), ("mixtral_8x7b", "format", "1.19"), ("qwen3_30b_a3b", "fp8_rowwise", "1.11")],
)
def test_check_says_from_which_load_on_replica_slots_are_used(name: str, experts: str, pays_from: str) -> None:
    overrides = [FP32, "--parallel.expert_clones=auto", f"--precision.experts={experts}"]
    recipe = load_recipe(RECIPES / f"{name}.toml", overrides)
    assert f"used while the busiest rank has more than {pays_from} times the mean load" in describe(recipe, 8)
