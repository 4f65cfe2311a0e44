"""Validation uses the current weights and leaves the model unchanged."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titan_moe.config import Recipe
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import TrainConfig
from titan_moe.data.packing import Batch
from titan_moe.training.build import Assembly, assemble
from titan_moe.training.evaluate import validation_loss

CPU = torch.device("cpu")
RECIPE = Recipe(
    model=ModelConfig(
        vocab_size=32,
        num_layers=2,
        hidden_size=16,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
        moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8),
        init_std=0.2,
    ),
    perf=PerfConfig(kernels="reference", loss_chunk_tokens=5),
    precision=PrecisionConfig("fp64", "fp64", "fp64"),
    compile=CompileConfig("off"),
    train=TrainConfig(steps=4, seq_len_tokens=8, global_batch_sequences=4, micro_batch_sequences=1),
)


def batch() -> Batch:
    tokens = torch.randint(32, (4, 1, 9), generator=torch.Generator().manual_seed(0))
    mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    return Batch(mine[..., :-1].contiguous(), mine[..., 1:].contiguous(), None)


def loss(run: Assembly) -> float:
    return validation_loss(run.model, run.parts, [batch()], CPU, run.meshes).item()


def change(parameters: list[nn.Parameter]) -> None:
    """Change the local shards directly, as a replayed step does."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.to_local().mul_(1.5)


def evaluate_twice(recipe: Recipe) -> dict[str, Any]:
    """Losses before and after a change of the weights, and that of a model evaluated only after the change."""
    run, fresh = assemble(recipe, CPU), assemble(recipe, CPU)
    parameters = run.optimizers.parameters
    before = loss(run)
    is_sharded = all(isinstance(parameter, DTensor) for parameter in run.optimizers.parameters)
    change(parameters)
    change(fresh.optimizers.parameters)
    return {"before": before, "after": loss(run), "fresh": loss(fresh), "is_sharded": is_sharded}


@pytest.mark.parametrize("accumulate_unsharded", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_validation_gathers_the_current_weights(ranks: Any, num_ranks: int, accumulate_unsharded: bool) -> None:
    parallel = ParallelConfig(ep=num_ranks, dispatcher="allgather", accumulate_unsharded=accumulate_unsharded)
    for result in ranks(num_ranks, evaluate_twice, replace(RECIPE, parallel=parallel)):
        assert result["after"] == result["fresh"] != result["before"]
        assert result["is_sharded"]
