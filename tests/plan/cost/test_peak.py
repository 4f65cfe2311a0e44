"""Estimated peaks of memory are near those that were measured (tools/results)."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.config import check_rules, load_recipe
from titan_moe.config.arena import bounds_layers
from titan_moe.config.clones import resolve_clones
from titan_moe.config.gemms import count_native_experts
from titan_moe.config.recipe import microbatch_tokens
from titan_moe.plan.check_report import describe
from titan_moe.plan.cost.graph_pool import gathering_bytes, message_bytes, reducing_bytes, sharded_experts
from titan_moe.plan.cost.loads import LayerLoads, layer_loads
from titan_moe.plan.cost.memory import (
    arena_bytes_per_rank,
    bytes_beyond_a_piece,
    experts_per_rank,
    gathered_bytes,
    parameters_of,
    temporary_bytes_per_rank,
    window_bytes,
)
from titan_moe.plan.cost.peak import activation_bytes_per_rank, peak_bytes
from titan_moe.plan.cost.sharded_experts import held_bytes
from titan_moe.plan.pipeline.parts import parts_of

RECIPES = Path(__file__).parents[3] / "recipes"
EP2 = ("--parallel.ep=2", "--model.num_layers=12")
DP2 = (*EP2, "--train.global_batch_sequences=8")
LONG = (*EP2, "--train.micro_batch_sequences=1", "--train.seq_len_tokens=32768", "--train.global_batch_sequences=1")
FP32 = ("--precision.master=fp32", "--precision.moments=bf16", "--parallel.accumulate_unsharded=true")
LITE = (*FP32, *EP2, "--train.global_batch_sequences=12")
MIXTRAL = (*FP32, "--parallel.ep=2", "--model.num_layers=8", "--train.global_batch_sequences=8")
V3 = (
    *FP32,
    "--model.hidden_size=7168", "--model.num_layers=4", "--model.attention.num_heads=128",
    "--model.attention.q_lora_rank=1536", "--model.vocab_size=129280", "--model.ffn_hidden_size=18432",
    "--model.moe.num_experts=64", "--model.moe.top_k=8", "--model.moe.ffn_hidden_size=2048",
    "--model.moe.shared_ffn_hidden_size=2048", "--parallel.ep=2", "--train.micro_batch_sequences=2",
    "--train.global_batch_sequences=8",
)  # fmt: skip
PIPELINE = ("--model.num_layers=12", "--train.global_batch_sequences=32", "--parallel.pp=2", "--parallel.ep=1")
PIPELINE = (*PIPELINE, "--parallel.dispatcher=local", "--parallel.overlap=none")
SPLIT = (*PIPELINE, "--parallel.vpp=2", "--parallel.accumulate_unsharded=true")
FP8, FP8_EXPERTS = "--precision.format=fp8_rowwise", "--precision.experts=fp8_rowwise"
MEASURED = {
    # recipe, overrides, capacity factor, GiB on 2 x H200
    "section 2, Qwen3": ("qwen3_30b_a3b", DP2, 1.125, 56.4),
    "section 2, Qwen3 on text": ("qwen3_30b_a3b", DP2, 1.25, 57.2),
    "section 2, Qwen3 collapsed on purpose": ("qwen3_30b_a3b", DP2, 2.5, 60.2),
    "section 2, V2-Lite": ("deepseek_v2_lite", LITE, 1.125, 65.1),
    "section 13, Qwen3": ("qwen3_30b_a3b", DP2, 1.125, 56.2),
    "section 13, Qwen3, experts in fp8": ("qwen3_30b_a3b", (*DP2, FP8_EXPERTS), 1.125, 52.9),
    "section 13, Qwen3, fp8": ("qwen3_30b_a3b", (*DP2, FP8), 1.125, 53.3),
    "section 13, V2-Lite": ("deepseek_v2_lite", LITE, 1.125, 64.8),
    "section 13, V2-Lite, fp8": ("deepseek_v2_lite", (*LITE, FP8), 1.125, 60.7),
    "section 13, Mixtral": ("mixtral_8x7b", MIXTRAL, 1.125, 88.2),
    "section 13, Mixtral, fp8": ("mixtral_8x7b", (*MIXTRAL, FP8), 1.125, 86.0),
    "section 13, V3's shape": ("deepseek_v2_lite", V3, 1.125, 103.5),
    "section 13, V3's shape, fp8": ("deepseek_v2_lite", (*V3, FP8), 1.125, 102.2),
    "section 14, dp 2": ("qwen3_30b_a3b", (*LONG, "--train.global_batch_sequences=2"), 1.125, 73.7),
    "section 14, tp 2, PyTorch's loss": (
        "qwen3_30b_a3b",
        (*LONG, "--parallel.tp=2", "--perf.override.head=torch"),
        1.125,
        61.5,
    ),
    "section 14, tp 2": ("qwen3_30b_a3b", (*LONG, "--parallel.tp=2"), 1.125, 56.1),
    "section 14, cp 2": ("qwen3_30b_a3b", (*LONG, "--parallel.cp=2"), 1.125, 57.7),
    "section 14, cp 2, fp8": ("qwen3_30b_a3b", (*LONG, "--parallel.cp=2", FP8), 1.125, 53.3),
    "section 14, cp 2, 131,072 tokens": (
        "qwen3_30b_a3b",
        (*LONG, "--parallel.cp=2", "--train.seq_len_tokens=131072"),
        1.125,
        114.5,
    ),
    "section 15, pp 1": ("qwen3_30b_a3b", (*EP2, "--train.global_batch_sequences=32"), 1.125, 71.3),
    "section 15, 1f1b": ("qwen3_30b_a3b", PIPELINE, 1.0, 87.8),
    "section 15, interleaved_1f1b": (
        "qwen3_30b_a3b",
        (*PIPELINE, "--parallel.vpp=2", "--parallel.pp_schedule=interleaved_1f1b"),
        1.0,
        91.0,
    ),
    "section 15, zbv": ("qwen3_30b_a3b", (*SPLIT, "--parallel.pp_schedule=zbv"), 1.0, 83.8),
    "section 15, dualpipev": ("qwen3_30b_a3b", (*SPLIT, "--parallel.pp_schedule=dualpipev"), 1.0, 88.7),
    "section 15, 1f1b, 8,192 tokens": ("qwen3_30b_a3b", (*PIPELINE, "--train.micro_batch_sequences=2"), 1.0, 78.9),
}
"""Peaks of launched steps in tools/results since rows lie in an arena, as shipped but for the overrides. Schedules
with split backwards had `accumulate_unsharded` (tools/pipelines.txt)."""
LONG4 = ("--model.num_layers=12", "--train.micro_batch_sequences=1", "--train.seq_len_tokens=32768")
MIXTRAL4 = (*FP32, "--model.num_layers=16", "--train.global_batch_sequences=16")
ZBV4 = (*SPLIT, "--model.num_layers=24", "--train.global_batch_sequences=64", "--parallel.pp=4")
ZBV4 = (*ZBV4, "--parallel.pp_schedule=zbv")
V3_CUT = (
    "--parallel.pp=1", "--parallel.vpp=1", "--parallel.pp_layout=", "--parallel.pp_schedule=1f1b", "--parallel.ep=2",
    "--model.num_layers=4", "--model.num_dense_layers=1", "--model.moe.num_experts=32", "--model.moe.num_groups=4",
    "--model.moe.top_k_groups=2", "--memory.recompute=none", "--train.global_batch_sequences=32",
)  # fmt: skip
MANY = "--train.global_batch_sequences=64"
V3_ALONE = ("--parallel.dispatcher=local", "--parallel.overlap=none", "--parallel.ep=1")
V3_OF_8 = tuple(word for word in V3_CUT if "num_layers=4" not in word and "ep=2" not in word)
V3_OF_8 = (*V3_OF_8, "--model.num_layers=8")
PP2_EP2 = ("--parallel.pp=2", "--parallel.ep=2")
V_OF_ZBV = ("--parallel.vpp=2", "--parallel.pp_schedule=zbv", "--parallel.accumulate_unsharded=true")
QWEN_OF_24 = ("--model.num_layers=24", "--train.global_batch_sequences=128")
PIPELINE4 = (*PIPELINE, "--model.num_layers=24", "--parallel.pp=4")
LITE4 = (*FP32, "--train.global_batch_sequences=24")
LITE_80 = ("--train.global_batch_sequences=16", "--train.micro_batch_sequences=4")
LITE_80 = (*LITE_80, "--parallel.accumulate_unsharded=false")
RECORDED = {
    # recipe, GPUs, overrides, capacity factor, GiB
    "section 2, V2-Lite": ("deepseek_v2_lite", 4, LITE4, 1.125, 117.3),
    "section 2, V2-Lite, text": ("deepseek_v2_lite", 4, LITE4, 1.25, 120.4),
    "section 2, Mixtral": ("mixtral_8x7b", 4, MIXTRAL4, 1.125, 98.8),
    "section 2, Mixtral, text": ("mixtral_8x7b", 4, MIXTRAL4, 1.5, 101.8),
    "section 7, Mixtral, text, clones": (
        "mixtral_8x7b", 4, (*MIXTRAL4, "--parallel.expert_clones=auto"), 1.25, 105.4,
    ),
    "section 2, Mixtral, 8 layers": ("mixtral_8x7b", 2, MIXTRAL, 1.25, 90.9),
    "4 x H100, V2-Lite": ("deepseek_v2_lite", 4, (*LITE_80, "--memory.recompute=norms:3-26"), 1.125, 72.1),
    "4 x H100, V2-Lite, codes beside split masters": ("deepseek_v2_lite", 4, (*LITE_80, FP8), 1.125, 72.0),
    "section 14, dp 4": ("qwen3_30b_a3b", 4, (*LONG4, "--train.global_batch_sequences=4"), 1.125, 67.5),
    "section 14, tp 2": (
        "qwen3_30b_a3b", 4, (*LONG4, "--train.global_batch_sequences=2", "--parallel.tp=2"), 1.125, 44.6,
    ),
    "section 14, cp 2": (
        "qwen3_30b_a3b", 4, (*LONG4, "--train.global_batch_sequences=2", "--parallel.cp=2"), 1.125, 46.5,
    ),
    "section 14, cp 2 on 2": ("qwen3_30b_a3b", 2, (*LONG, "--parallel.cp=2"), 1.125, 63.0),
    "section 15, 8 microbatches": ("qwen3_30b_a3b", 4, QWEN_OF_24, 1.125, 93.3),
    "section 15, 16 microbatches, pp 2 and ep 2": (
        "qwen3_30b_a3b", 4, (*QWEN_OF_24, *PP2_EP2), 1.125, 100.2,
    ),
    "section 15, 8 microbatches, pp 4": ("qwen3_30b_a3b", 4, PIPELINE4, 1.0, 94.5),
    "section 15, 8 microbatches, pp 4, zbv": (
        "qwen3_30b_a3b", 4, (*ZBV4, "--train.global_batch_sequences=32"), 1.0, 90.3,
    ),
    "section 15, 16 microbatches, pp 4, zbv": ("qwen3_30b_a3b", 4, ZBV4, 1.0, 89.8),
    "section 15, 8 microbatches on 2": ("qwen3_30b_a3b", 2, (*EP2, MANY), 1.125, 74.8),
    "section 15, 16 microbatches, 1f1b": ("qwen3_30b_a3b", 2, (*PIPELINE, MANY), 1.0, 91.0),
    "section 15, 16 microbatches, zbv": ("qwen3_30b_a3b", 2, (*SPLIT, MANY, "--parallel.pp_schedule=zbv"), 1.0, 88.7),
    "section 15, DeepSeek-V3": ("deepseek_v3", 4, V3_OF_8, 1.125, 106.0),
    "section 15, DeepSeek-V3, pp 2 and ep 2": ("deepseek_v3", 4, (*V3_OF_8, *PP2_EP2), 1.125, 101.7),
    "section 15, DeepSeek-V3, pp 2 and ep 2, 16 microbatches": (
        "deepseek_v3", 4, (*V3_OF_8, *PP2_EP2, MANY), 1.125, 102.1,
    ),
    "section 15, DeepSeek-V3, pp 4": ("deepseek_v3", 4, (*V3_OF_8, *V3_ALONE, "--parallel.pp=4"), 1.0, 88.5),
    "section 15, DeepSeek-V3, pp 4, 8 microbatches": (
        "deepseek_v3", 4, (*V3_OF_8, *V3_ALONE, "--parallel.pp=4", "--train.global_batch_sequences=16"), 1.0, 88.0,
    ),
    "section 15, DeepSeek-V3, pp 4, zbv": (
        "deepseek_v3", 4, (*V3_OF_8, *V3_ALONE, "--parallel.pp=4", *V_OF_ZBV), 1.0, 91.9,
    ),
    "section 15, DeepSeek-V3, 4 layers": ("deepseek_v3", 2, V3_CUT, 1.125, 86.4),
    "section 15, DeepSeek-V3, 4 layers, pp 2": ("deepseek_v3", 2, (*V3_CUT, *V3_ALONE, "--parallel.pp=2"), 1.0, 93.9),
}  # fmt: skip
"""Peaks of recorded steps with expandable segments, with all that the pool of their graph holds."""
HELD_MESSAGES = {
    "section 15, 16 microbatches, pp 2 and ep 2": (2, 2),
    "section 15, 8 microbatches, pp 4": (1, 2, 2, 1),
    "section 15, 8 microbatches, pp 4, zbv": (2, 4, 4, 2),
    "section 15, 16 microbatches, 1f1b": (2, 2),
    "section 15, 16 microbatches, zbv": (4, 4),
    "section 15, DeepSeek-V3, 4 layers, pp 2": (3.5, 3.5),
}
"""GiB of all messages of a step, by pipeline rank. Pools held them when these peaks were measured: messages had no
buffers then."""


@pytest.mark.parametrize("name", MEASURED)
def test_peak_is_near_what_was_measured(name: str) -> None:
    name_of_recipe, overrides, factor, measured_gib = MEASURED[name]
    recipe = load_recipe(RECIPES / f"{name_of_recipe}.toml", [*overrides, "--compile.cudagraph=off"])
    assert check_rules(recipe, 2) == []
    assert max(peak_bytes(part, factor) for part in parts_of(recipe, 2)) / 2**30 == pytest.approx(
        measured_gib, rel=0.03
    )


@pytest.mark.parametrize("name", RECORDED)
def test_peak_with_the_pool_of_a_graph_is_near_what_was_measured(name: str) -> None:
    name_of_recipe, num_gpus, overrides, factor, measured_gib = RECORDED[name]
    words = [f"--parallel.ep={num_gpus}", *overrides, "--compile.cudagraph=step"]
    recipe = resolve_clones(load_recipe(RECIPES / f"{name_of_recipe}.toml", words), num_gpus)
    assert check_rules(recipe, num_gpus) == []
    parts = parts_of(recipe, num_gpus)
    buffers = [message_bytes(part) / 2**30 for part in parts]
    messages = zip(parts, buffers, HELD_MESSAGES.get(name, buffers), strict=True)
    estimated = max(peak_bytes(part, factor) / 2**30 - own + held for part, own, held in messages)
    assert estimated == pytest.approx(measured_gib, rel=0.035), estimated / measured_gib


@pytest.mark.parametrize(("loss", "elements"), [("triton", 0), ("torch", 1)])
def test_the_loss_of_a_gpu_is_tritons_also_over_tp(loss: str, elements: int) -> None:
    """Two ranks have half of the words of twice the tokens: logits of a chunk, and an fp32 gradient of the head. That
    of PyTorch has fp32 logits, exponentials, quotients and gradients beside them, and masks."""
    words = ["--model.num_layers=2", "--train.global_batch_sequences=8", "--parallel.ep=2", "--parallel.tp=2"]
    words += ["--train.micro_batch_sequences=1", "--compile.cudagraph=off"]
    file = RECIPES / "qwen3_30b_a3b.toml"
    auto, fixed = (load_recipe(file, [*words, *more]) for more in ([], [f"--perf.override.head={loss}"]))
    more = peak_bytes(parts_of(fixed, 2)[0], 1.0) - peak_bytes(parts_of(auto, 2)[0], 1.0)
    assert more == elements * 4096 * 151_936 // 2 * (5 * 4 + 1)


def test_arena_and_temporaries_of_qwen3_on_eight_ranks() -> None:
    recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml", [])
    tokens, layers, width, hidden = 16_384, 48, 2048, 768
    rows = 8 * tokens * (1 - 0.3333)  # the probability that none of 8 choices falls into 16 of 128 experts is about 1/3
    arena = layers * (rows * width + 8 * tokens * 2 * hidden) * 2
    assert arena_bytes_per_rank(recipe, 1.0) == pytest.approx(arena, rel=0.01)
    worst_slots = 8 * tokens * 8
    assert temporary_bytes_per_rank(recipe) == (2 * 8 * tokens * width + worst_slots * (3 * hidden + width)) * 2


def test_temporaries_of_a_bounded_layer() -> None:
    """Three quarters of the worst case's slots have no room; the sum of weight gradients over pieces has, and so have
    joined rows and the assignments of all pieces."""
    two = "--parallel.expert_layer_capacity_factor=2"
    worst, bounded = (load_recipe(RECIPES / "qwen3_30b_a3b.toml", given) for given in ([], [two]))
    loads, weight_grads = layer_loads(bounded).bounded(2.0), 16 * 3 * 768 * 2048 * 2
    assert loads.worst_slots == layer_loads(worst).worst_slots / 4 and loads.worst_rows == 8 * 16_384
    of_slots = 48 * 16_384 * (3 * 768 + 2048) * 2
    assert temporary_bytes_per_rank(worst) - temporary_bytes_per_rank(bounded) == of_slots - weight_grads - 2**26
    kept = activation_bytes_per_rank(bounded) - activation_bytes_per_rank(worst)
    assert kept == 48 * 8 * (loads.worst_slots * 3) == 288 * 2**20
    of_block = [two, "--memory.recompute=block"]
    of_one = activation_bytes_per_rank(load_recipe(RECIPES / "qwen3_30b_a3b.toml", of_block))
    without = activation_bytes_per_rank(load_recipe(RECIPES / "qwen3_30b_a3b.toml", of_block[1:]))
    assert of_one - without == kept / 48
    assert temporary_bytes_per_rank(worst, 2.0) == temporary_bytes_per_rank(bounded)
    assert temporary_bytes_per_rank(bounded, 8.0) == temporary_bytes_per_rank(worst), "what bounds nothing"
    assert arena_bytes_per_rank(bounded, 0.0) < arena_bytes_per_rank(worst, 0.0) / 2, "of one layer"
    assert arena_bytes_per_rank(bounded, 1.25) == arena_bytes_per_rank(worst, 1.25)
    rows = layer_loads(bounded).bounded(2.0).worst_rows
    beyond = 2 * (rows - rows / 4) * 2048 * 2  # a piece has a quarter of all tokens
    assert bytes_beyond_a_piece(bounded) == pytest.approx(beyond) and bytes_beyond_a_piece(worst) == 0
    assert bounds_layers(bounded) and not bounds_layers(worst)
    said = " ".join(describe(bounded, 8).split())
    assert "GiB of one layer's temporaries, of up to 2 times a balanced load, or of pieces and their sums" in said


def test_recomputed_blocks_need_the_arena_of_one() -> None:
    """Experts that are recomputed need none, and those without hidden states rows alone."""
    whole, blocks, experts, some, rows = (
        load_recipe(RECIPES / "qwen3_30b_a3b.toml", [f"--memory.recompute={what}"])
        for what in ("none", "block", "experts", "experts:12", "moe_act")
    )
    assert arena_bytes_per_rank(blocks, 1.5) == arena_bytes_per_rank(whole, 0.0) < arena_bytes_per_rank(whole, 1.0) / 5
    assert arena_bytes_per_rank(experts, 1.5) == 0
    assert arena_bytes_per_rank(some, 1.5) == pytest.approx(0.75 * arena_bytes_per_rank(whole, 1.5))
    of_rows = layer_loads(rows).room(1.5)[0] * 2 * rows.model.hidden_size
    assert arena_bytes_per_rank(rows, 1.5) == of_rows < arena_bytes_per_rank(whole, 1.5)


@pytest.mark.parametrize(
    ("recipe", "name", "elements"),
    [
        ("qwen3_30b_a3b", "norms", 48 * 2 * 2048),
        ("qwen3_30b_a3b", "qkv_rope", 48 * (32 + 2 * 4) * 128),  # queries, keys and values
        ("qwen3_30b_a3b", "attention", 48 * 32 * 128),
        ("deepseek_v2_lite", "norms:-3", 3 * 2 * 2048),
        ("deepseek_v2_lite", "mla_up:2", 2 * 16 * (192 + 192 + 256)),  # queries, keys, and values with keys
        ("deepseek_v2_lite", "dense_mlp", 2 * 10944),
        ("deepseek_v2_lite", "shared_experts", 26 * 2 * 2816),
    ],
)
def test_what_a_part_frees(recipe: str, name: str, elements: int) -> None:
    """In bf16, for each token of a microbatch: of what is kept, and of the peak but for what is made of one layer."""
    kept, without = (load_recipe(RECIPES / f"{recipe}.toml", [f"--memory.recompute={one}"]) for one in ("none", name))
    num_tokens = kept.train.micro_batch_sequences * kept.train.seq_len_tokens
    freed = activation_bytes_per_rank(kept) - activation_bytes_per_rank(without)
    assert freed == 2 * elements * num_tokens
    (of_kept,), (of_without,) = (parts_of(one, 8) for one in (kept, without))
    of_one_layer = 2 * num_tokens * elements / kept.model.num_layers
    of_peak = peak_bytes(of_kept, 1.125) - peak_bytes(of_without, 1.125)
    assert freed - 2 * max(of_one_layer, freed / 3) <= of_peak <= freed * 1.1


def test_hidden_states_that_are_computed_again_have_no_slots_in_the_arena() -> None:
    kept, without, some = (
        load_recipe(RECIPES / "qwen3_30b_a3b.toml", [f"--memory.recompute={name}"])
        for name in ("none", "moe_act", "moe_act:16")
    )
    of_kept, of_none, of_some = (arena_bytes_per_rank(one, 1.25) for one in (kept, without, some))
    slots = round(1.25 * 4 * 4096 * 8) * 48  # of all layers, two hidden states of 768 each
    assert of_kept - of_none == pytest.approx(slots * 2 * 768 * 2, rel=1e-3)
    assert of_kept - of_some == pytest.approx((of_kept - of_none) / 3, rel=1e-3)
    part = parts_of(without, 8)[0]
    assert peak_bytes(part, 1.25) < peak_bytes(parts_of(kept, 8)[0], 1.25) - 0.8 * (of_kept - of_none)


def test_room_of_an_arena_is_between_the_worst_case_of_one_layer_and_of_all() -> None:
    loads = LayerLoads(4, rows=10.5, slots=20, worst_rows=16, worst_slots=80)
    assert loads.room(0.0) == (16, 80)
    assert loads.room(1.5) == (63, 120)
    assert loads.room(100.0) == (64, 320)
    assert loads.largest_factor(1, 2, 63 + 240) == 1.5
    assert loads.largest_factor(1, 2, 64 + 640) == math.inf and loads.largest_factor(1, 2, 10) == 0.0
    assert loads._replace(num_layers=0).largest_factor(1, 2, 10) == math.inf, "a pipeline stage without experts"
    without_hidden = loads._replace(num_hidden_layers=0)
    assert without_hidden.room(math.inf) == (64, 0) and without_hidden.largest_factor(1, 2, 10) == 0


def test_microbatches_in_flight_are_in_the_peak_of_a_pipeline_rank() -> None:
    recipe = load_recipe(RECIPES / "deepseek_v3.toml", [])
    more, fewer = (parts_of(recipe, 128)[rank] for rank in (2, 14))
    assert more.recipe == fewer.recipe and more.num_in_flight > fewer.num_in_flight + 10
    in_flight = (more.num_in_flight - fewer.num_in_flight) * activation_bytes_per_rank(more.recipe)
    assert peak_bytes(more, 1.125) - peak_bytes(fewer, 1.125) == pytest.approx(in_flight, rel=1e-6)


def test_parked_moments_are_in_the_peak_by_two_shards_at_most() -> None:
    recipe = load_recipe(RECIPES / "mixtral_8x7b.toml", [])
    parked = replace(recipe, memory=replace(recipe.memory, park="moments"))
    (part,), (changed,) = parts_of(recipe, 8), parts_of(parked, 8)
    moments = parameters_of(part) * recipe.precision.bytes_of_moments
    saved = peak_bytes(part, 1.125) - peak_bytes(changed, 1.125)
    assert saved == pytest.approx(moments, rel=0.05) and 0 < window_bytes(changed) < moments / 20


def test_what_waits_for_weight_gradients_is_in_the_peak() -> None:
    """In an arena, or in tensors with room for the worst case, while what attention kept is freed."""
    words = ["--parallel.pp=4", "--parallel.vpp=2", "--parallel.pp_schedule=zbv", "--train.micro_batch_sequences=1"]
    words += ["--parallel.accumulate_unsharded=true", "--train.global_batch_sequences=64"]
    words += ["--parallel.expert_clones=off", "--compile.cudagraph=off"]
    file = RECIPES / "qwen3_30b_a3b.toml"
    in_arena, worst = (load_recipe(file, [*words, f"--parallel.expert_rank_capacity_factor={c}"]) for c in (1.5, 0))
    more = {}
    for name, recipe in {"arena": in_arena, "worst": worst}.items():
        part = parts_of(recipe, 32)[3]
        assert part.num_delayed == pytest.approx(4, abs=0.1), "of both stages"
        more[name] = peak_bytes(part, 1.5) - peak_bytes(replace(part, num_delayed=0.0), 1.5)
    layers, tokens, width, hidden = len(range(19, 32)), 4096, 2048, 768
    added = layers * (8 * tokens * width + 8 * 8 * tokens * hidden) * 2
    freed = activation_bytes_per_rank(parts_of(in_arena, 32)[3].recipe)
    assert more["arena"] == 0, "delayed slabs of the arena have it"
    assert more["worst"] == pytest.approx(4 * (added - freed), rel=0.03)


def test_what_attention_kept_is_freed_before_weight_gradients_in_an_arena() -> None:
    """If linear layers compute theirs at once."""
    words = ["--parallel.pp=4", "--parallel.vpp=2", "--parallel.pp_schedule=zbv"]
    words += ["--train.micro_batch_sequences=1", "--train.global_batch_sequences=32", "--parallel.expert_clones=off"]
    words += ["--parallel.accumulate_unsharded=true", "--compile.cudagraph=off"]
    part, other = (
        parts_of(load_recipe(RECIPES / "qwen3_30b_a3b.toml", [*words, f"--compile.regional={compiles}"]), 32)[1]
        for compiles in ("on", "off")
    )
    assert part.num_in_flight == 4 and part.num_before_backward == pytest.approx(38 / 13)
    more = peak_bytes(other, 1.125) - peak_bytes(part, 1.125)
    assert more == pytest.approx((4 - 38 / 13) * activation_bytes_per_rank(part.recipe), rel=1e-6) and more > 2 * 2**30


def test_a_pool_is_what_a_snapshot_of_it_has() -> None:
    """The allocator's, after the capture of a step of DeepSeek-V3's shape (tools/results/parallel.md): one segment a
    stream, in GiB."""
    main, gathering, reducing = 63.74, 5.41, 3.79
    recipe = load_recipe(RECIPES / "deepseek_v3.toml", ["--parallel.ep=4", *V3_OF_8, "--compile.cudagraph=step"])
    (part,) = parts_of(recipe, 4)
    assert gathering_bytes(part) / 2**30 == pytest.approx(gathering, rel=0.005)
    assert reducing_bytes(part) / 2**30 == pytest.approx(reducing, rel=0.005)
    outside = parameters_of(part) * 8 + arena_bytes_per_rank(recipe, 1.125, part.slabs)
    assert (peak_bytes(part, 1.125) - outside) / 2**30 == pytest.approx(main + gathering + reducing, rel=0.01)


def test_what_is_gathered_second_lies_where_the_share_of_the_first_was_or_behind() -> None:
    """Embedding and head, then a block, as FSDP gathers them; two blocks and their experts, as each waits for its own
    while the next ones are gathered; nothing on one rank."""
    words = ["--model.num_layers=2", "--parallel.ep=4", "--parallel.expert_clones=off", "--compile.cudagraph=step"]
    gathered = {}
    for name, num_ranks, vocabulary in (("within", 4, 151_936), ("behind", 4, 2048), ("experts", 8, 2048)):
        recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml", [*words, f"--model.vocab_size={vocabulary}"])
        (part,) = parts_of(recipe, num_ranks)
        gathered[name] = gathering_bytes(part) / 2
    width = 2048
    block = width * (128 * (32 + 2 * 4) + 32 * 128 + 128 + 2) + 2 * 128  # attention, router, norms
    root = 2 * 151_936 * width
    assert gathered["within"] == root * 5 / 4
    assert gathered["behind"] == 2 * 2048 * width + block * 5 / 4
    experts = 32 * 3 * width * 768
    assert gathered["experts"] == 2 * (block + experts) + experts / 2, "sharded over edp 2"
    split = replace(part, recipe=replace(recipe, precision=replace(recipe.precision, master="fp32_split")))
    assert gathering_bytes(split) / 2 == 2 * (block + experts), "nothing is cast"
    single = replace(part, recipe=replace(recipe, model=replace(recipe.model, num_layers=1)))
    assert gathering_bytes(single) / 2 == block + experts * 3 / 2
    alone = ["--parallel.ep=1", "--parallel.dispatcher=local", "--parallel.overlap=none"]
    assert gathering_bytes(parts_of(load_recipe(RECIPES / "qwen3_30b_a3b.toml", [*words, *alone]), 1)[0]) == 0


def test_sharded_experts_of_a_layer_are_in_the_peak() -> None:
    """Launched: beside the temporaries of the last layer's backward its experts, and those of the layer before, which
    are on the way; of all layers, if they are not resharded. Few tokens: gradients in bf16 and their message in fp32,
    less what the experts kept."""
    words = ["--model.num_layers=8", "--parallel.ep=1", "--parallel.dispatcher=local", "--parallel.overlap=none"]
    words += ["--parallel.expert_clones=off", "--compile.cudagraph=off", "--train.micro_batch_sequences=8"]
    file, stays = RECIPES / "qwen3_30b_a3b.toml", "--parallel.reshard_experts_after_forward=false"
    again, kept = (parts_of(load_recipe(file, [*words, *more]), 4)[0] for more in ([], [stays]))
    experts = 128 * 3 * 2048 * 768
    assert gathered_bytes(again) == 0 and gathered_bytes(kept) == 8 * 2 * experts
    assert peak_bytes(kept, 1.0) - peak_bytes(again, 1.0) == (8 - 2) * 2 * experts
    few, hidden = [*words, "--train.micro_batch_sequences=1", "--train.seq_len_tokens=128"], 128 * 8 * 2 * 768 * 2
    fp32, bf16 = (
        parts_of(load_recipe(file, [*few, f"--precision.reduce={dtype}"]), 4)[0] for dtype in ("fp32", "bf16")
    )
    assert (layer := sharded_experts(fp32)) is not None
    down = experts / 3  # whose gradient is there twice
    assert held_bytes(fp32, layer, hidden, has_sums=False).reducing == (2 + 4) * experts + 2 * down - hidden
    assert held_bytes(fp32, layer, hidden, has_sums=True).reducing == 4 * (experts + down) - hidden
    more = peak_bytes(fp32, 1.0) - peak_bytes(bf16, 1.0)
    assert more == pytest.approx((4 - 2) * experts, rel=0.01), "parameters and their gradients are as many bytes"


def test_copies_of_the_first_layers_experts_last_until_the_end_of_its_backward() -> None:
    """Where the peak is, if blocks are recomputed. Split masters need no copies, and are as many bytes."""
    words = ["--model.num_layers=8", "--model.moe.num_experts=32", "--parallel.ep=1", "--parallel.dispatcher=local"]
    words += ["--parallel.overlap=none", "--parallel.expert_clones=off", "--train.global_batch_sequences=4"]
    words += ["--compile.cudagraph=off", "--memory.recompute=block"]
    fp32, split = (
        peak_bytes(
            parts_of(load_recipe(RECIPES / "qwen3_30b_a3b.toml", [*words, f"--precision.master={name}"]), 1)[0], 1
        )
        for name in ("fp32", "fp32_split")
    )
    assert fp32 - split == 32 * 3 * 2048 * 768 * 2


def test_a_pool_has_buffers_of_messages() -> None:
    """However many microbatches there are: four of sent tensors, and those of gradients that have come."""
    words, tensor = [*PIPELINE4, "--compile.cudagraph=step"], 16_384 * 2048 * 2
    eight, many = (
        [message_bytes(part) / tensor for part in parts_of(load_recipe(RECIPES / "qwen3_30b_a3b.toml", more), 4)]
        for more in (words, [*words, "--train.global_batch_sequences=256"])
    )
    assert eight == many == [5, 5, 5, 5]


def test_buffers_of_stages_without_layers_are_counted() -> None:
    """These keep no activations in which a received one would be counted."""
    words = [*PIPELINE4, "--model.num_layers=12", "--parallel.vpp=2", "--parallel.pp_schedule=interleaved_1f1b"]
    first = {}
    for layout in ("E|t*4|t*4|t*4||||L", "Et|t|t*2|t*2|t|t|t*2|t*2L"):
        recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml", [*words, f"--parallel.pp_layout={layout}"])
        assert check_rules(recipe, 4) == []
        first[layout] = parts_of(recipe, 4)[0].num_messages
    empty, full = first.values()
    assert empty == 9 and full == 6


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


def test_layers_without_a_format_keep_rows_and_hidden_states_in_bf16() -> None:
    """Without an arena, as formats differ; all layers of one format have one."""
    kept = {}
    for number in (0, 2, 40, 48):
        words = ["--precision.experts=fp8_rowwise", f"--precision.num_layers_at_start_in_compute={number}"]
        recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml", [*words, "--parallel.overlap=none"])
        kept[number] = activation_bytes_per_rank(recipe)
    assert kept[0] == kept[48], "in the arena"
    tokens, width, hidden = 16_384, 2048, 768
    rows = 8 * tokens * (1 - math.comb(112, 8) / math.comb(128, 8))
    layer = (rows * width + 8 * tokens * 2 * hidden) * 2
    assert kept[2] - kept[0] == pytest.approx((2 + 46 / 2) * layer, rel=1e-6)
    assert kept[40] - kept[0] == pytest.approx((40 + 8 / 2) * layer, rel=1e-6)


def test_layers_without_a_format_are_those_of_a_pipelines_rank() -> None:
    """The first two of the model are on the first rank."""
    words = ["--parallel.pp=4", "--parallel.ep=2", "--train.micro_batch_sequences=1", "--precision.experts=fp8_rowwise"]
    words += ["--precision.num_layers_at_start_in_compute=2", "--parallel.overlap=none"]
    first, second, *_ = parts_of(load_recipe(RECIPES / "qwen3_30b_a3b.toml", words), 8)
    kept = [part.recipe.model.num_layers - count_native_experts(part.recipe) for part in (first, second)]
    assert kept == [2, 0]
    assert not first.has_arena("fused") and not second.has_arena("fused"), "all ranks alike"


def test_gathered_tensors_are_kept_over_tp_and_cp() -> None:
    """Of a token: over tp the input of projections, with `ulysses` the result before and after its exchange, with
    `allgather` keys and values of all tokens."""
    words = ["--train.micro_batch_sequences=1", "--train.seq_len_tokens=16384"]
    recipes = {
        name: load_recipe(RECIPES / "qwen3_30b_a3b.toml", [*words, *layout])
        for name, layout in {
            "alone": (),
            "tp": ("--parallel.tp=2",),
            "ulysses": ("--parallel.cp=2", "--parallel.cp_kind=ulysses"),
            "allgather": ("--parallel.cp=2", "--parallel.cp_kind=allgather"),
            "ring": ("--parallel.cp=2", "--parallel.cp_kind=ring"),
        }.items()
    }
    bytes_of_width = 48 * 16_384 * 2
    alone = activation_bytes_per_rank(recipes.pop("alone")) // 2  # a rank has half of the tokens
    more = {name: activation_bytes_per_rank(recipe) - alone for name, recipe in recipes.items()}
    half = bytes_of_width // 2
    assert more == {"tp": 2048 * half, "ulysses": 4096 * half, "allgather": 2 * 4 * 128 * half, "ring": 0}


def test_qk_clip_keeps_queries_and_keys_beside_the_copies_of_sinks() -> None:
    words = ["--train.micro_batch_sequences=1", "--train.seq_len_tokens=1024"]
    for backend, recompute, num_layers in (("auto", "none", 24), ("auto", '["attention:3"]', 21), ("flex", "none", 0)):
        layout = [*words, f"--perf.attention={backend}", f"--memory.recompute={recompute}"]
        without, clipped = (
            load_recipe(RECIPES / "gpt_oss_20b.toml", [*layout, f"--optim.qk_clip.threshold={threshold}"])
            for threshold in (0, 100)
        )
        more = activation_bytes_per_rank(clipped) - activation_bytes_per_rank(without)
        assert more == num_layers * (64 + 8) * 64 * 1024 * 2


def test_experts_of_pytorch_keep_rows_of_slots_and_activations_too() -> None:
    """As those of gpt-oss in fp8, which Triton's cannot add biases to; hidden states are kept in any case."""
    layout = ["--parallel.ep=1", "--parallel.dispatcher=local", "--parallel.overlap=none"]
    plain, fp8, chosen = (
        activation_bytes_per_rank(load_recipe(RECIPES / "gpt_oss_20b.toml", [*layout, *more]))
        for more in ([], [FP8_EXPERTS], ["--perf.override.experts=grouped_mm"])
    )
    assert fp8 - plain == chosen - plain == 24 * 4 * 16_384 * (2880 + 2880) * 2


def test_recomputed_layers_keep_their_inputs() -> None:
    """Without an arena experts keep their rows, and blocks the hidden states before them."""
    words = ["--parallel.dispatcher=alltoall", "--parallel.overlap=none", "--parallel.expert_rank_capacity_factor=0"]
    none, experts, block = (
        load_recipe(RECIPES / "qwen3_30b_a3b.toml", [*words, f"--memory.recompute={what}"])
        for what in ("none", "experts", "block")
    )
    rows = round(8 * 16_384 * (1 - math.comb(112, 8) / math.comb(128, 8)) * 48 * 2048)
    hidden = 48 * 16_384 * 8 * 2 * 768
    assert activation_bytes_per_rank(none) - activation_bytes_per_rank(experts) == pytest.approx(2 * hidden, abs=1e3)
    choices = 48 * 16_384 * 8 * 4
    assert activation_bytes_per_rank(block) == 2 * 48 * 16_384 * 2048 + choices, "and the experts of each token"
    assert activation_bytes_per_rank(experts) > 2 * rows, "their rows are kept"


@pytest.mark.parametrize("dispatcher", ["local", "allgather", "alltoall"])
def test_a_model_without_experts_has_a_peak_alone_and_in_a_pipeline(dispatcher: str) -> None:
    words = ["--model.moe.num_experts=0", "--model.ffn_hidden_size=512"]
    words += ["--run.device=cuda", "--precision.compute=bf16", "--train.micro_batch_sequences=1"]
    words += [f"--parallel.dispatcher={dispatcher}"]
    alone, pipeline = (load_recipe(RECIPES / "quickstart.toml", [*words, f"--parallel.pp={pp}"]) for pp in (1, 2))
    assert check_rules(alone, 1) == check_rules(pipeline, 2) == []
    assert "at the peak of a step" in describe(alone, 1) and "at the peak of a step" in describe(pipeline, 2)
    fewer = replace(alone, model=replace(alone.model, num_layers=3))
    layer = activation_bytes_per_rank(alone) - activation_bytes_per_rank(fewer)
    assert layer == activation_bytes_per_rank(alone) / 4 > 256 * 2 * 512 * 2, "hidden states and more"


@pytest.mark.parametrize("ep", [1, 4])
def test_padded_experts_have_the_slots_of_their_capacity(ep: int) -> None:
    words = [f"--parallel.ep={ep}", "--parallel.expert_rank_capacity_factor=0", "--metrics.sample_tokens=0"]
    words += [f"--parallel.dispatcher={'allgather' if ep > 1 else 'local'}", "--model.moe.capacity_factor=0.5"]
    file = RECIPES / "qwen3_30b_a3b.toml"
    pads = "--model.moe.pad_to_capacity=true"
    dropping, padded, texts = (
        load_recipe(file, words + more) for more in ([], [pads], [pads, "--metrics.sample_tokens=16320"])
    )
    tokens, top_k = microbatch_tokens(padded), padded.model.moe.top_k
    assert layer_loads(padded).worst_slots == tokens * top_k / 2
    assert layer_loads(dropping).worst_slots == ep * tokens * top_k
    assert layer_loads(texts).worst_slots == ep * tokens * top_k, "text of as many tokens drops nothing"
    part, plain = (parts_of(recipe, 4)[0] for recipe in (padded, dropping))
    assert peak_bytes(part, 1.0) < peak_bytes(plain, 1.0)
