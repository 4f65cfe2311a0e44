"""What goes to the host: bytes by layer and pipeline rank, the peak without them, and what `check` says."""

import re
from pathlib import Path

from titan_moe.config import Recipe, check_rules, load_recipe
from titan_moe.plan.check_report import describe
from titan_moe.plan.cost.offload import copied_bytes, host_bytes, sent_bytes
from titan_moe.plan.cost.peak import peak_bytes
from titan_moe.plan.pipeline.parts import offload_of_stages, parts_of

RECIPES = Path(__file__).parents[3] / "recipes"
STREAM, ATTENTION = 16_384 * 2048 * 2, 16_384 * (4096 + 2 * 512 + 4096) * 2
"""Bytes of a layer of Qwen3."""


def qwen3(*words: str) -> Recipe:
    return load_recipe(RECIPES / "qwen3_30b_a3b.toml", ["--memory.recompute=none", *words])


def test_bytes_of_a_layer_are_those_of_its_names() -> None:
    recipe = qwen3("--memory.offload=block:2,attention:1-2,ffn_norm:-3")
    assert sent_bytes(recipe) == [STREAM, STREAM + ATTENTION, ATTENTION, *[0] * 42, STREAM, 0, 0], "the last two stay"
    assert {name: len(layers) for name, layers in offload_of_stages(recipe).layers.items()} == {
        "block": 2, "attention": 2, "ffn_norm": 1
    }  # fmt: skip
    assert sent_bytes(qwen3()) == [0] * 48


def test_bytes_of_mla_are_queries_keys_and_what_values_lie_in() -> None:
    recipe = load_recipe(RECIPES / "deepseek_v2_lite.toml", ["--memory.recompute=none", "--memory.offload=attention"])
    a, size = recipe.model.attention, recipe.train.micro_batch_sequences * recipe.train.seq_len_tokens * 2
    of_head = 2 * (a.qk_nope_head_dim + a.qk_rope_head_dim) + (a.qk_nope_head_dim + a.v_head_dim) + a.v_head_dim
    assert set(sent_bytes(recipe)[:-2]) == {size * a.num_heads * of_head}


def test_the_peak_is_lower_by_what_has_left() -> None:
    words = ("--compile.cudagraph=off", "--memory.offload=block,attention,ffn_norm")
    (plain,), (offloaded,) = (parts_of(qwen3(*words[:number]), 8) for number in (1, 2))
    whole = 46 * (2 * STREAM + ATTENTION)
    assert peak_bytes(plain, 1.0) - peak_bytes(offloaded, 1.0) == whole
    assert host_bytes(offloaded) == copied_bytes(offloaded) == whole, "of one microbatch"


def test_a_pipeline_has_places_for_microbatches_in_flight_and_holds_the_inputs_of_stages() -> None:
    words = ("--model.num_layers=12", "--train.global_batch_sequences=32", "--parallel.pp=2", "--parallel.ep=1")
    recipe = qwen3(*words, "--parallel.dispatcher=local", "--parallel.overlap=none", "--memory.offload=block")
    assert check_rules(recipe, 2) == []
    assert offload_of_stages(recipe).layers["block"] == set(range(12)) - {8}
    first, last = parts_of(recipe, 2)
    assert (host_bytes(first), host_bytes(last)) == (2 * 8 * STREAM, 3 * STREAM)
    assert copied_bytes(first) == 8 * 8 * STREAM, "of all microbatches of a step"


def test_check_shows_the_memory_of_the_host_and_the_time_of_copies() -> None:
    report = describe(qwen3("--memory.offload=attention"), 8, "NVIDIA H100 80GB HBM3")
    assert "\noffload     12.9 GiB a rank in pinned memory of the host; 12.9 GiB a rank go there in a step" in report
    assert "on NVIDIA H100 80GB HBM3 448 ms of copies in each direction, at 31 GB/s" in report
    assert 'EXPERIMENTAL: memory.offload = "attention"' in report
    assert not re.search("^offload", describe(qwen3(), 8), re.MULTILINE)
