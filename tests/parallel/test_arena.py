"""The arena of a model has the size that the plan counts."""

import pytest
import torch

from titan_moe.config import Recipe
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import PerfConfig
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.parallel.arena import give_arena
from titan_moe.plan.memory import arena_bytes_per_rank
from titan_moe.train.build import build_on_meta

MODEL = ModelConfig(num_layers=4, hidden_size=64, moe=MoEConfig(num_experts=8, ffn_hidden_size=32))


@pytest.mark.parametrize(("tp", "etp"), [(1, 1), (1, 4), (2, 2)])
def test_arena_has_the_planned_size(tp: int, etp: int) -> None:
    parallel = ParallelConfig(tp=tp, ep=2, etp=etp, dispatcher="symm_mem", expert_rank_capacity_factor=1.5)
    recipe = Recipe(model=MODEL, parallel=parallel, perf=PerfConfig(kernels="fused"))
    capacity = ExpertCapacity(1.5)
    give_arena(build_on_meta(recipe), recipe, torch.device("cpu"), capacity)
    assert capacity.arena is not None and capacity.arena.num_bytes > 0
    assert capacity.arena.num_bytes == arena_bytes_per_rank(recipe, 1.5)
    num_tokens = etp * 8 * 256 // tp
    slots = 1.5 * 4 * num_tokens * MODEL.moe.top_k
    assert capacity.arena.hidden_BH.shape == (slots, 2 * 32 / etp), "of the tokens of an etp group"
