"""Estimated peaks of memory are near those that were measured (tools/RESULTS.md, section 2)."""

import math
from pathlib import Path

import pytest

from titan_moe.config import load_recipe
from titan_moe.plan.loads import LayerLoads
from titan_moe.plan.memory import arena_bytes_per_rank, experts_per_rank, gathered_bytes, temporary_bytes_per_rank
from titan_moe.plan.peak import activation_bytes_per_rank, peak_bytes, peak_bytes_per_rank
from titan_moe.plan.pipeline.parts import parts_of

RECIPES = Path(__file__).parents[2] / "recipes"
FOUR = ("--train.micro_batch_sequences=4", "--train.global_batch_sequences=32", "--parallel.accumulate_unsharded=false")
TWICE = ("--train.micro_batch_sequences=4", "--train.global_batch_sequences=64", "--parallel.accumulate_unsharded=true")
EP2 = ("--parallel.ep=2", "--model.num_layers=12", "--train.global_batch_sequences=8")
MEASURED = {
    # recipe, overrides, ranks, capacity factor, GiB
    "Qwen3 on 8": ("qwen3_30b_a3b", (), 8, 1.05, 108.6),
    "Qwen3 on 8, two microbatches": ("qwen3_30b_a3b", TWICE, 8, 1.05, 129.5),
    "Qwen3, 12 layers on 2": ("qwen3_30b_a3b", EP2, 2, 1.125, 56.4),
    "V2-Lite on 8": ("deepseek_v2_lite", FOUR, 8, 1.05, 68.8),
    "V2-Lite on 8, two microbatches": ("deepseek_v2_lite", TWICE, 8, 1.05, 82.0),
    "Mixtral on 8": ("mixtral_8x7b", (), 8, 1.05, 109.0),
}


@pytest.mark.parametrize("name", MEASURED)
def test_peak_is_within_five_percent_of_what_was_measured(name: str) -> None:
    recipe, overrides, num_ranks, factor, measured_gib = MEASURED[name]
    peak = peak_bytes_per_rank(load_recipe(RECIPES / f"{recipe}.toml", [*overrides]), num_ranks, factor)
    assert peak / 2**30 == pytest.approx(measured_gib, rel=0.05)


def test_arena_and_temporaries_of_qwen3_on_eight_ranks() -> None:
    recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml", [])
    tokens, layers, width, hidden = 16_384, 48, 2048, 768
    rows = 8 * tokens * (1 - 0.3333)  # the probability that none of 8 choices falls into 16 of 128 experts is about 1/3
    arena = layers * (rows * width + 8 * tokens * 2 * hidden) * 2
    assert arena_bytes_per_rank(recipe, 1.0) == pytest.approx(arena, rel=0.01)
    worst_slots = 8 * tokens * 8
    assert temporary_bytes_per_rank(recipe) == (8 * tokens * width + worst_slots * (3 * hidden + width)) * 2


def test_recomputed_layers_need_the_arena_of_one() -> None:
    whole, again = (
        load_recipe(RECIPES / "qwen3_30b_a3b.toml", [f"--memory.recompute={what}"]) for what in ("none", "experts")
    )
    assert arena_bytes_per_rank(again, 1.5) == arena_bytes_per_rank(whole, 0.0) < arena_bytes_per_rank(whole, 1.0) / 5


def test_room_of_an_arena_is_between_the_worst_case_of_one_layer_and_of_all() -> None:
    loads = LayerLoads(4, rows=10.5, slots=20, worst_rows=16, worst_slots=80)
    assert loads.room(0.0) == (16, 80)
    assert loads.room(1.5) == (63, 120)
    assert loads.room(100.0) == (64, 320)
    assert loads.largest_factor(1, 2, 63 + 240) == 1.5
    assert loads.largest_factor(1, 2, 64 + 640) == math.inf and loads.largest_factor(1, 2, 10) == 0.0
    assert loads._replace(num_layers=0).largest_factor(1, 2, 10) == math.inf, "a pipeline stage without experts"


def test_microbatches_in_flight_are_in_the_peak_of_a_pipeline_rank() -> None:
    recipe = load_recipe(RECIPES / "deepseek_v3.toml", [])
    more, fewer = (parts_of(recipe, 128)[rank] for rank in (2, 14))
    assert more.recipe == fewer.recipe and more.num_in_flight > fewer.num_in_flight + 10
    in_flight = (more.num_in_flight - fewer.num_in_flight) * activation_bytes_per_rank(more.recipe)
    assert peak_bytes(more, 1.125) - peak_bytes(fewer, 1.125) == pytest.approx(in_flight, rel=1e-6)


def test_copies_of_a_pipelines_experts_last_for_the_step() -> None:
    """Also where experts are recomputed: microbatches in flight share them."""
    words = ["--parallel.accumulate_unsharded=false", "--parallel.reshard_after_forward=true"]
    recipe = load_recipe(RECIPES / "deepseek_v3.toml", words)
    part = parts_of(recipe, 128)[2]
    assert gathered_bytes(part) == 2 * experts_per_rank(part.recipe) > 0


def test_a_gathering_dispatcher_keeps_the_rows_of_all_ranks_once() -> None:
    """However many experts of a rank a row has."""
    gathered, sent = (
        load_recipe(RECIPES / "qwen3_30b_a3b.toml", [f"--parallel.dispatcher={name}", "--parallel.overlap=none"])
        for name in ("allgather", "alltoall")
    )
    m, num_tokens = gathered.model, 4 * 4096
    visited = 1 - math.comb(112, 8) / math.comb(128, 8)
    more = activation_bytes_per_rank(gathered) - activation_bytes_per_rank(sent)
    assert more == pytest.approx(2 * m.num_layers * 8 * num_tokens * (1 - visited) * m.hidden_size, rel=1e-6)
