"""The arena of a model has the size that the plan counts, and in a pipeline a slab for each microbatch in flight."""

from dataclasses import replace

import pytest
import torch

from titan_moe.config import Recipe
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import MemoryConfig, PerfConfig
from titan_moe.config.train import TrainConfig
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.models.part import part_of
from titan_moe.parallel.arena import give_arena
from titan_moe.plan.cost.memory import arena_bytes_per_rank
from titan_moe.plan.resolved import Resolved
from titan_moe.training.build import build_on_meta

MODEL = ModelConfig(num_layers=4, hidden_size=64, moe=MoEConfig(num_experts=8, ffn_hidden_size=32))


@pytest.mark.parametrize(("tp", "etp"), [(1, 1), (1, 4), (2, 2)])
def test_arena_has_the_planned_size(tp: int, etp: int) -> None:
    parallel = ParallelConfig(tp=tp, ep=2, etp=etp, dispatcher="symm_mem", expert_rank_capacity_factor=1.5)
    recipe = Recipe(model=MODEL, parallel=parallel, perf=PerfConfig(kernels="fused"))
    capacity = ExpertCapacity(1.5)
    model = build_on_meta(recipe)
    give_arena(model, [model], Resolved(recipe, 8), torch.device("cpu"), capacity)
    assert capacity.arena is not None and capacity.arena.num_bytes > 0
    assert capacity.arena.num_bytes == arena_bytes_per_rank(recipe, 1.5)
    num_tokens = etp * 8 * 256 // tp
    slots = 1.5 * 4 * num_tokens * MODEL.moe.top_k
    assert capacity.arena.hidden_BH.shape == (slots, 2 * 32 / etp), "of the tokens of an etp group"


PIPELINE = Recipe(
    model=replace(MODEL, num_layers=6, num_dense_layers=1, ffn_hidden_size=32),
    parallel=ParallelConfig(
        pp=2, vpp=2, pp_schedule="zbv", pp_layout="Ett|t|t|ttL", ep=2, dispatcher="symm_mem",
        expert_rank_capacity_factor=1.5,
    ),
    perf=PerfConfig(kernels="fused"),
    train=TrainConfig(seq_len_tokens=128, global_batch_sequences=32, micro_batch_sequences=2),
)  # fmt: skip


def arena_of(recipe: Recipe, rank: int, *stages: list[str]) -> ExpertCapacity:
    capacity, model = ExpertCapacity(1.5), build_on_meta(recipe)
    parts = [part_of(model, names) for names in stages]
    give_arena(model, parts, Resolved(recipe, 4), torch.device("cpu"), capacity, pipeline_rank=rank)
    for part in parts:
        for hook in part._forward_pre_hooks.values():
            hook(part, ())
    return capacity


def test_a_pipeline_has_slabs_of_the_largest_stage_and_a_factor_of_one_slab() -> None:
    first, last = ["embed", "layers.0", "layers.1"], ["layers.4", "layers.5", "norm", "head"]
    capacity = arena_of(PIPELINE, 0, first, last)
    arena, num_tokens = capacity.arena, 2 * 128
    of_one = 1.5 * 2 * num_tokens * MODEL.moe.top_k  # slots of two layers
    assert arena.num_slabs == 4, "both stages of the first rank keep as many microbatches as 2 * pp"
    assert arena.room[1] == of_one and len(arena.hidden_BH) == 4 * of_one
    assert arena.heads_P3[:, 2].tolist() == [2, 0, 0, 0], "a forward of each stage, without a schedule"
    arena.need.copy_(torch.tensor([0, of_one]))
    assert float(capacity.needed_factor()) == pytest.approx(1.5)
    with capacity.writing_to(2):
        with capacity.writing_to(3):
            capacity.start_forward()
        assert capacity.slab == 2
    assert arena.heads_P3[:, 2].tolist() == [2, 0, 0, 1] and capacity.slab == 0
    assert arena.num_delayed_slabs == 2 and len(arena.dactive_GF) == 2 * of_one
    assert arena.dy_CW.shape == (2 * arena.room[0], 64) and arena.dactive_GF.shape[1] == 32
    row, slot = arena.room_bytes
    assert arena.num_bytes == arena.room[0] * row + arena.room[1] * slot
    capacity.resize(0.0)
    assert not len(arena.dy_CW) and not len(arena.dactive_GF) and not arena.can_delay
    assert len(arena.hidden_BH) == arena.room[1], "nothing is kept"


def test_a_rank_without_experts_has_an_empty_arena_and_overwrites_no_slab() -> None:
    """All ranks decide alike whether there is an arena: some of what follows is collective."""
    dense = replace(PIPELINE, model=replace(PIPELINE.model, num_dense_layers=4))
    capacity = arena_of(dense, 1, ["layers.2"], ["layers.3"])
    assert capacity.arena is not None and capacity.arena.num_bytes == 0 == float(capacity.needed_factor())
    capacity = arena_of(dense, 0, ["embed", "layers.0", "layers.1"], ["layers.4", "layers.5", "norm", "head"])
    assert capacity.arena.heads_P3[:, 2].tolist() == [1], "the forward of the dense stage takes nothing"


def test_an_arena_of_recomputed_stages_has_one_slab() -> None:
    recipe = replace(PIPELINE, memory=MemoryConfig("block"))
    assert arena_of(recipe, 1, ["layers.2"], ["layers.3"]).arena.num_slabs == 1
