"""Layouts agree to quantisation noise, and weights that are gathered as codes stay plain parameters."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config import Recipe
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.config.perf import CompileConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import TrainConfig
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.parallel.mesh import build_meshes
from titan_moe.train.build import build_on_meta, build_parts

SEQUENCES, TOKENS = 4, 32
MODEL = ModelConfig(
    vocab_size=64,
    num_layers=2,
    num_dense_layers=1,
    hidden_size=32,
    ffn_hidden_size=64,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=16),
    moe=MoEConfig(num_experts=4, ffn_hidden_size=32, shared_ffn_hidden_size=32),
    init_std=0.1,
)
RECIPE = Recipe(model=MODEL, compile=CompileConfig("off"), train=TrainConfig(seq_len_tokens=TOKENS))
FP32 = PrecisionConfig("fp32", backend="emulated")
"""Without bf16 the differences are those of formats alone."""


def gradients(precision: PrecisionConfig, parallel: ParallelConfig = RECIPE.parallel) -> dict[str, Any]:
    """Gradients of all ranks' sequences, in full; and what FSDP gathered of one weight."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    meshes = build_meshes(resolve(parallel, num_ranks), torch.device("cpu"))
    recipe = replace(RECIPE, precision=precision, parallel=parallel)
    (model,) = build_parts(build_on_meta(recipe), recipe, meshes, torch.device("cpu"), ExpertCapacity())
    dtypes = []
    qkv = model.layers["1"].attention.qkv
    qkv.register_forward_pre_hook(lambda module, args: dtypes.append(type(module.weight.data).__name__))
    tokens = torch.randint(64, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))
    mine = tokens.unflatten(0, (num_ranks, -1))[rank]
    for _ in range(2):  # the second forward reuses what the first has allocated
        model.zero_grad()
        (model(mine, mine) / tokens.numel()).backward()
    assert type(qkv.weight.to_local()) is torch.Tensor, "a shard is plain"
    flat = torch.cat([parameter.grad.full_tensor().flatten().double() for parameter in model.parameters()])
    return {"flat": flat, "gathered": dtypes[-1], "names": sorted(model.state_dict())}


def decibels(exact: Tensor, other: Tensor) -> float:
    return float(10 * torch.log10(exact.square().sum() / (exact - other).square().sum().clamp(min=1e-300)))


@pytest.mark.parametrize(
    ("options", "of_format", "of_layout"),
    [
        ({"linears": "fp8_rowwise"}, 30, 100),  # a power of two more or less changes no digit
        ({"linears": "fp8_rowwise", "wgrad": "compute"}, 30, 100),
        ({"linears": "fp8_tensorwise"}, 26, 30),  # a scale of all tokens of a rank
        ({"linears": "fp8_tensorwise", "all_gather": "format"}, 26, 30),
    ],
    ids=str,
)
def test_one_and_two_ranks_agree_to_quantisation_noise(
    ranks: Any, options: dict[str, Any], of_format: float, of_layout: float
) -> None:
    (exact,) = ranks(1, gradients, FP32)
    (one,) = ranks(1, gradients, replace(FP32, **options))
    two, other = ranks(2, gradients, replace(FP32, **options))
    assert torch.equal(two["flat"], other["flat"]) and one["names"] == two["names"] == exact["names"]
    assert decibels(exact["flat"], one["flat"]) > of_format
    assert decibels(one["flat"], two["flat"]) > of_layout
    gathered = "Float8TrainingTensor" if "all_gather" in options else "Tensor"
    assert one["gathered"] == two["gathered"] == gathered


def test_codes_are_gathered_among_shards_of_a_replica(ranks: Any) -> None:
    gathers = replace(FP32, linears="fp8_tensorwise", all_gather="format")
    one, *_ = ranks(1, gradients, gathers)
    four, *others = ranks(4, gradients, gathers, ParallelConfig(dp_replicate=2, ep=2, dispatcher="alltoall"))
    assert all(torch.equal(four["flat"], other["flat"]) for other in others)
    assert four["gathered"] == "Float8TrainingTensor" and decibels(one["flat"], four["flat"]) > 30
