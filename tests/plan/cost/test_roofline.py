"""The least work of each part, against the count of the model and manual arithmetic."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.config import Recipe, load_recipe
from titan_moe.config.model import AttentionConfig, ModelConfig
from titan_moe.config.modules import Module
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.qk_clip import QKClipConfig
from titan_moe.config.train import OptimConfig, TrainConfig
from titan_moe.plan.choice.hardware import find_hardware
from titan_moe.plan.cost.count import training_flops_per_token
from titan_moe.plan.cost.links import rows_sent
from titan_moe.plan.cost.roofline import RegionWork, exchanged_bytes, sharding_bytes, step_work
from titan_moe.plan.pipeline.parts import RankPart
from titan_moe.plan.resolved import Resolved

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "deepseek_v2_lite", "mixtral_8x7b", "quickstart"])
def test_roofline_parts_sum_to_the_model(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    work = step_work(recipe, world_size=8)
    flops = sum(part.flops for part in work.values()) - work["router"].flops  # which MFU leaves out
    num_tokens = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens / 8
    assert flops == pytest.approx(training_flops_per_token(recipe.model, recipe.train.seq_len_tokens) * num_tokens)


def test_roofline_with_windows_follows_the_count() -> None:
    recipe = load_recipe(RECIPES / "mixtral_8x7b.toml", ["--model.attention.sliding_window=100"])
    flops = sum(part.flops for name, part in step_work(recipe, world_size=8).items() if name != "router")
    num_tokens = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens / 8
    assert flops == pytest.approx(training_flops_per_token(recipe.model, recipe.train.seq_len_tokens) * num_tokens)


def test_roofline_rows_by_dispatcher() -> None:
    recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml")

    def copies(dispatcher: str, ep: int = 8) -> float:
        parallel = ParallelConfig(ep=ep, dispatcher=dispatcher)  # type: ignore[arg-type]
        return rows_sent(replace(recipe, parallel=parallel), 8).all

    assert copies("local", ep=1) == 0 and copies("alltoall", ep=1) == 0
    assert copies("allgather") == 7
    assert copies("alltoall") == pytest.approx(7 / 8 * 5.34, abs=0.005), "8 of 128 experts lie on 5.34 of 8 ranks"


def test_roofline_bytes_by_hand() -> None:
    recipe: Recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml")
    parallel = ParallelConfig(ep=8, dispatcher="allgather")
    adamw, fused_adamw = (replace(recipe.optim, kind=kind) for kind in ("adamw", "fused_adamw"))
    gathered = replace(recipe, parallel=parallel, perf=PerfConfig(), precision=PrecisionConfig(), optim=adamw)
    work = step_work(gathered, world_size=8)
    num_tokens = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens / 8
    m = recipe.model
    assert work["dispatch"].wire_bytes == 2 * m.num_layers * num_tokens * 7 * m.hidden_size * 2
    assert work["combine"] == work["dispatch"]
    none, tile = (
        step_work(replace(recipe, parallel=ParallelConfig(ep=8, dispatcher="symm_mem", overlap=overlap)), 8)
        for overlap in ("none", "tile")
    )
    moved = none["dispatch"].wire_bytes + none["combine"].wire_bytes
    assert tile["experts"] == replace(none["experts"], wire_bytes=moved)
    assert none.keys() - tile.keys() == {"dispatch", "combine"}, "experts move the rows"
    state_bytes = Resolved(gathered, 8).state_bytes
    assert work["optimizer"].memory_bytes == pytest.approx(7 / 4 * state_bytes)
    assert work["clip"].memory_bytes == pytest.approx(3 / 4 * state_bytes)
    ours = replace(gathered, optim=fused_adamw, precision=PrecisionConfig(moments="bf16"))
    assert step_work(ours, 8)["optimizer"].memory_bytes == pytest.approx(20 / 16 * state_bytes), "of 28 bytes, 8 less"
    assert step_work(ours, 8)["clip"].memory_bytes == pytest.approx(1 / 4 * state_bytes), "the norm alone"
    assert "shared" not in work and "latent" not in work, "what a model does not have is not listed"


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [  # 100 parameters in the root, 60 in the blocks, 400 in experts; bf16 gathers, fp32 sums, 2 microbatches
        (ParallelConfig(dp_shard=1), 0),
        (ParallelConfig(dp_shard=4), 2 * 3 / 4 * (100 * (2 + 4) + 60 * (2 * 2 + 4) + 400 * (2 * 2 + 4))),
        (ParallelConfig(dp_shard=4, ep=4, dispatcher="alltoall"), 2 * 3 / 4 * (100 * (2 + 4) + 60 * (2 * 2 + 4))),
        (ParallelConfig(dp_shard=4, reshard_after_forward=False), 2 * 3 / 4 * (160 * (2 + 4) + 400 * (2 * 2 + 4))),
        (ParallelConfig(dp_replicate=4, dp_shard=1), 2 * 3 / 4 * 560 * 4),  # once
    ],
)
def test_roofline_sharding_bytes(parallel: ParallelConfig, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"embed": ("embedding", None, 50), "head": ("head", None, 50), "attention": ("attention", range(1), 60)}
    rows = [Module(path, *where, own_parameters=size) for path, (*where, size) in sizes.items()]
    experts = Module("experts", "experts", range(1), own_parameters=400 / parallel.ep)
    monkeypatch.setattr("titan_moe.config.modules.default_modules", lambda *_: [*rows, experts])
    num_ranks = parallel.dp_shard * parallel.dp_replicate
    train = TrainConfig(global_batch_sequences=2 * num_ranks, micro_batch_sequences=1)
    recipe = Recipe(model=ModelConfig(name="sharding"), parallel=parallel, train=train)
    assert sharding_bytes(RankPart(recipe, num_ranks)) == pytest.approx(expected)
    once = replace(parallel, accumulate_unsharded=True, reshard_after_forward=True, reshard_experts_after_forward=True)
    kept = replace(parallel, reshard_after_forward=False, reshard_experts_after_forward=False)
    of_two = sharding_bytes(RankPart(replace(recipe, parallel=kept), num_ranks))
    times = 2 if parallel.dp_replicate == 1 else 1
    assert sharding_bytes(RankPart(replace(recipe, parallel=once), num_ranks)) == pytest.approx(of_two / times)


GQA = AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=16)
MLA = AttentionConfig(kind="mla", num_heads=8, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)


@pytest.mark.parametrize(
    ("attention", "parallel", "elements"),
    [  # received by a rank for each of its tokens, by a layer, forward
        (GQA, ParallelConfig(), 0),
        (GQA, ParallelConfig(cp=2), 1 / 2 * (8 + 2 + 2 + 8) * 16),
        (GQA, ParallelConfig(cp=4), 3 / 4 * (8 + 4 + 4 + 8) * 16),  # two ranks get the same keys and values
        (GQA, ParallelConfig(cp=4, cp_kind="allgather"), 3 * (2 + 2) * 16),
        # backward: keys and values again, and their gradients in fp32
        (GQA, ParallelConfig(cp=4, cp_kind="ring"), 3 * (2 + 2) * 16 * (1 + 1 + 2) / 2),
        (GQA, ParallelConfig(cp=2, tp=2), 1 / 2 * 2 * (4 + 2 + 2 + 4) * 16),  # 4 and 1 heads, of twice the tokens
        (MLA, ParallelConfig(cp=4), 3 / 4 * 8 * (16 + 8 + 12) + 3 * (32 + 8)),
        (MLA, ParallelConfig(cp=4, cp_kind="allgather"), 3 * (32 + 8)),
    ],
)
def test_roofline_bytes_between_context_parallel_ranks(
    attention: AttentionConfig, parallel: ParallelConfig, elements: float
) -> None:
    recipe = Recipe(model=ModelConfig(num_layers=3, attention=attention), parallel=parallel)
    world_size = parallel.cp * parallel.tp
    num_tokens = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens // world_size
    work, alone = step_work(recipe, world_size)["attention"], step_work(replace(recipe, parallel=ParallelConfig()), 1)
    assert work.wire_bytes == pytest.approx(2 * 2 * 3 * num_tokens * elements)  # bf16, forward and backward
    assert work.flops == pytest.approx(alone["attention"].flops / world_size)


def test_qk_clip_sends_keys_around_a_ring_once_more() -> None:
    model, ring = ModelConfig(num_layers=3, attention=GQA), ParallelConfig(cp=4, cp_kind="ring")
    with_clip, without = (
        exchanged_bytes(Recipe(model=model, parallel=ring, optim=OptimConfig(qk_clip=QKClipConfig(threshold))), 10)
        for threshold in (100.0, 0.0)
    )
    assert with_clip - without == 2 * 3 * 10 * 3 * 2 * 16


def test_roofline_time_is_of_the_scarcest_resource() -> None:
    h200 = find_hardware("NVIDIA H200")
    assert h200 is not None
    assert RegionWork(flops=989e9).floor_ms(h200) == pytest.approx(1.0)
    assert RegionWork(flops=989e9, memory_bytes=9.6e9).floor_ms(h200) == pytest.approx(2.0)
    assert RegionWork(flops=989e9, wire_bytes=1.35e9).floor_ms(h200) == pytest.approx(3.0)
