"""The plan of expert tensor parallelism, against manual arithmetic."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from titan_moe.config import Recipe, load_recipe
from titan_moe.config.gemms import gemm_modules, why_kept
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import MetricsConfig
from titan_moe.kernels.symm_mem.arrays import symm_bytes
from titan_moe.kernels.symm_mem.clones import clone_bytes
from titan_moe.plan.check_report import describe
from titan_moe.plan.cost.memory import (
    arena_bytes_per_rank,
    shared_bytes_per_rank,
    temporary_bytes_per_rank,
)
from titan_moe.plan.cost.peak import activation_bytes_per_rank
from titan_moe.plan.cost.roofline import sharding_bytes, step_work
from titan_moe.plan.pipeline.parts import RankPart
from titan_moe.plan.resolved import Resolved

QWEN3 = Path(__file__).parents[3] / "recipes" / "qwen3_30b_a3b.toml"
TOKENS, LAYERS, WIDTH, HIDDEN, CHOICES = 16_384, 48, 2048, 768, 8  # of a rank's microbatch, of the model
MODEL = ModelConfig(num_layers=2, hidden_size=64, moe=MoEConfig(num_experts=8, ffn_hidden_size=32))
EP4_ETP2 = ParallelConfig(ep=4, etp=2, dispatcher="symm_mem")


def qwen3(*overrides: str) -> Recipe:
    return load_recipe(QWEN3, ["--parallel.ep=4", "--parallel.etp=2", *overrides])


def test_etp_ranks_keep_parts_of_the_weights() -> None:
    recipe = Recipe(model=MODEL, parallel=EP4_ETP2)
    whole = replace(recipe, parallel=ParallelConfig(ep=8, dispatcher="alltoall"))
    assert Resolved(recipe, 8).state_bytes == Resolved(whole, 8).state_bytes
    assert Resolved(replace(recipe, parallel=ParallelConfig(etp=2)), 8).state_bytes == Resolved(whole, 8).state_bytes
    assert Resolved(recipe, 8).gathered_bytes == Resolved(whole, 8).gathered_bytes == 2 * 2 * 3 * 64 * 32


def test_check_names_the_part_of_an_expert() -> None:
    page = describe(Recipe(model=MODEL, parallel=EP4_ETP2), 8)
    assert "dispatcher symm_mem; 16 of the width 32 of an expert, for rows of 2 ranks" in page and "etp 2" in page
    assert "of an expert" not in describe(Recipe(model=MODEL), 8)


def test_etp_ranks_have_the_down_bias_whole() -> None:
    plain = Recipe(model=MODEL, parallel=EP4_ETP2)
    biased = replace(plain, model=replace(MODEL, moe=replace(MODEL.moe, expert_mlp_bias=True)))
    biases_of_a_rank = 2 * 2 * (2 * 16 + 64)  # two layers with two experts
    assert Resolved(biased, 8).state_bytes - Resolved(plain, 8).state_bytes == 16 * biases_of_a_rank


def test_etp_rows_and_hidden_states_of_qwen3() -> None:
    recipe = qwen3()
    rows = 4 * 2 * TOKENS * (1 - 0.0945)  # the probability that none of 8 choices falls into 32 of 128 experts
    slots = 2 * TOKENS * CHOICES
    arena = LAYERS * (rows * WIDTH + slots * 2 * HIDDEN / 2) * 2
    assert arena_bytes_per_rank(recipe, 1.0) == pytest.approx(arena, rel=0.01)
    worst_slots = 4 * 2 * TOKENS * CHOICES
    temporary = (2 * 8 * TOKENS * WIDTH + worst_slots * (3 * HIDDEN // 2 + WIDTH)) * 2
    assert temporary_bytes_per_rank(recipe) == temporary


def test_etp_gathered_rows_are_kept_for_backward() -> None:
    parallel = ("--parallel.ep=1", "--parallel.dispatcher=local", "--parallel.overlap=none")
    alone, split = (load_recipe(QWEN3, [*parallel, f"--parallel.etp={etp}"]) for etp in (1, 4))
    gathered_rows = LAYERS * 4 * TOKENS * WIDTH * 2  # hidden states are as many: four times the slots, a quarter wide
    added = activation_bytes_per_rank(split) - activation_bytes_per_rank(alone)
    assert added == gathered_rows


def test_etp_shared_bytes_are_what_the_dispatcher_opens() -> None:
    recipe = Recipe(model=MODEL, parallel=EP4_ETP2, precision=PrecisionConfig("bf16"))
    opened = symm_bytes(4, 2 * 8 * 256, 64, MODEL.moe.top_k, torch.bfloat16)
    assert shared_bytes_per_rank(recipe) == pytest.approx(opened, abs=1024)
    few = replace(recipe.train, seq_len_tokens=1, micro_batch_sequences=1)
    cloning = replace(
        recipe, parallel=replace(EP4_ETP2, expert_clones="auto"), train=few, metrics=MetricsConfig(sample_tokens=0)
    )
    opened = clone_bytes(4, 2, 2, 3 * 64 * 16, torch.bfloat16)
    assert shared_bytes_per_rank(cloning) == pytest.approx(opened, abs=1024)


def test_etp_bytes_on_the_wire_by_hand() -> None:
    recipe = qwen3("--parallel.dispatcher=allgather", "--parallel.overlap=none")
    work, num_tokens = step_work(recipe, 8), recipe.train.global_batch_sequences * recipe.train.seq_len_tokens / 8
    row_bytes = 2 * LAYERS * num_tokens * WIDTH * 2  # there and back, of all layers
    assert work["dispatch"].wire_bytes == row_bytes * (1 + 2 * 3), "one other etp rank's, then two ranks' from three"
    assert work["combine"] == work["dispatch"]
    assert work["experts"].flops == step_work(load_recipe(QWEN3), 8)["experts"].flops, "a half of twice as many rows"
    tile = step_work(qwen3(), 8)
    assert tile["dispatch"].wire_bytes == tile["combine"].wire_bytes == row_bytes
    sent = 3 * (1 - 0.0945)
    assert tile["experts"].wire_bytes == pytest.approx(2 * row_bytes * 2 * sent, rel=0.01)


def test_etp_parts_of_experts_are_what_fsdp_gathers() -> None:
    parallel = ("--parallel.dispatcher=alltoall", "--parallel.overlap=none")
    split = load_recipe(QWEN3, [*parallel, "--parallel.ep=2", "--parallel.etp=2"])
    whole = load_recipe(QWEN3, [*parallel, "--parallel.ep=4"])
    assert sharding_bytes(RankPart(split, 8)) == sharding_bytes(RankPart(whole, 8)) > 0


def test_etp_parts_of_experts_have_a_format_if_their_width_fits() -> None:
    def reason(etp: int) -> str:
        recipe = load_recipe(QWEN3, ["--precision.experts=fp8_rowwise", f"--parallel.etp={etp}"])
        (module,) = (it for it in gemm_modules(recipe.model) if it.name == "layers.0.feed_forward.experts")
        return why_kept(recipe, module)

    assert not reason(1) and not reason(16)
    assert reason(32) == "width 768, of which a rank has 24, is no multiple of 16"
