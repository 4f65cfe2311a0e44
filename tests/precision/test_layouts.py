"""Layouts agree to quantisation noise."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config import Recipe
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import resolve
from titan_moe.config.perf import CompileConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import TrainConfig
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.parallel.mesh import build_meshes
from titan_moe.plan.resolved import Resolved
from titan_moe.training.build import build_on_meta, build_parts

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


def gradients(precision: PrecisionConfig) -> tuple[Tensor, list[str]]:
    """Gradients of all ranks' sequences, in full; and the names of all tensors."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    meshes = build_meshes(resolve(RECIPE.parallel, num_ranks), torch.device("cpu"))
    recipe = replace(RECIPE, precision=precision)
    (model,) = build_parts(
        build_on_meta(recipe), Resolved(recipe, num_ranks), meshes, torch.device("cpu"), ExpertCapacity()
    )
    tokens = torch.randint(64, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))
    mine = tokens.unflatten(0, (num_ranks, -1))[rank]
    (model(mine, mine) / tokens.numel()).backward()
    flat = torch.cat([parameter.grad.full_tensor().flatten().double() for parameter in model.parameters()])
    return flat, sorted(model.state_dict())


def decibels(exact: Tensor, other: Tensor) -> float:
    return float(10 * torch.log10(exact.square().sum() / (exact - other).square().sum().clamp(min=1e-300)))


@pytest.mark.parametrize(
    ("options", "of_format", "of_layout"),
    [
        ({"linears": "fp8_rowwise"}, 30, 100),  # a power of two more or less changes no digit
        ({"linears": "fp8_rowwise", "wgrad": "compute"}, 30, 100),
        ({"linears": "fp8_tensorwise"}, 26, 30),  # a scale of all tokens of a rank
    ],
    ids=str,
)
def test_one_and_two_ranks_agree_to_quantisation_noise(
    ranks: Any, options: dict[str, Any], of_format: float, of_layout: float
) -> None:
    ((exact, names),) = ranks(1, gradients, FP32)
    ((one, names_of_one),) = ranks(1, gradients, replace(FP32, **options))
    (two, names_of_two), (other, _) = ranks(2, gradients, replace(FP32, **options))
    assert torch.equal(two, other) and names_of_one == names_of_two == names
    assert decibels(exact, one) > of_format
    assert decibels(one, two) > of_layout
