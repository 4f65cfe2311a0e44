"""Memory of codes, held against a model that is built with them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from titan_moe.adapters import low_rank, stored
from titan_moe.adapters.frozen import freeze
from titan_moe.config import Recipe
from titan_moe.config.adapter import AdapterConfig
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import OptimConfig
from titan_moe.models.transformer import Transformer
from titan_moe.parameters import SCALES
from titan_moe.plan.cost.codes import code_bytes, numbers_bytes, stored_numbers
from titan_moe.plan.cost.memory import state_bytes
from titan_moe.plan.pipeline.parts import parts_of

MOE = MoEConfig(num_experts=6, top_k=3, ffn_hidden_size=140, shared_ffn_hidden_size=22)
MODEL = ModelConfig(
    vocab_size=61,
    num_layers=3,
    num_dense_layers=1,
    hidden_size=300,
    ffn_hidden_size=130,
    attention=AttentionConfig(num_heads=9, num_kv_heads=3, head_dim=6),
    moe=MOE,
)


@pytest.mark.parametrize("base", ["fp8_rowwise", "fp8_blockwise"])
@pytest.mark.parametrize("trainable", [(), ("layers.1.*",)])
def test_codes_and_scales_are_those_of_the_model(base: Any, trainable: tuple[str, ...]) -> None:
    adapter = AdapterConfig(rank=4, targets=("attention", "experts"), base=base)
    recipe = Recipe(model=replace(MODEL, adapter=adapter), optim=OptimConfig(trainable=trainable))
    with torch.device("meta"):
        built = Transformer(recipe.model, kernels=Kernels(experts="reference"))
        stored.apply(built, adapter, trainable)
        low_rank.apply(built, adapter)
    freeze(built, trainable, torch.bfloat16, has_adapters=True)
    parameters = dict(built.named_parameters())
    codes = {name for name, parameter in parameters.items() if parameter.itemsize == 1}
    assert {f"{name}{SCALES}" for name in codes} == {name for name in parameters if name.endswith(SCALES)}
    nbytes = {name: parameter.numel() * parameter.itemsize for name, parameter in parameters.items()}
    found = sum(size for name, size in nbytes.items() if name in codes or name.endswith(SCALES))
    (part,) = parts_of(recipe, 1)
    assert code_bytes(part) == found
    trained = sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad)
    frozen = sum(size for name, size in nbytes.items() if not parameters[name].requires_grad)
    precision = PrecisionConfig()
    assert state_bytes(part) == frozen + trained * (4 + 4 + precision.bytes_of_moments)
    assert numbers_bytes(recipe) == 2 * 6 * 2 * 300 * 140, "gate and up of a layer in bf16"


def test_ranks_divide_codes_of_experts_alone() -> None:
    adapter = AdapterConfig(rank=4, base="fp8_rowwise")
    model, parallel = replace(MODEL, adapter=adapter), ParallelConfig(ep=2, dispatcher="alltoall")
    (one,), (of_two,) = (
        parts_of(Recipe(model=model, parallel=p), n) for p, n in ((ParallelConfig(), 1), (parallel, 2))
    )
    of_experts, dense = (stored_numbers(one, of_experts=which) for which in (True, False))
    assert stored_numbers(of_two, of_experts=True) == of_experts / 2
    assert stored_numbers(of_two, of_experts=False) == dense
