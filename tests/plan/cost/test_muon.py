"""What the table says of Muon against a built model's step: names, parameters, counted FLOPs, messages."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.muon import MuonConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.train import OptimConfig
from titan_moe.models.transformer import Transformer
from titan_moe.optim.build import build_optimizer
from titan_moe.optim.muon import muon_matrices
from titan_moe.plan.cost.memory import state_bytes
from titan_moe.plan.cost.muon import (
    describe_muon,
    exchanged_bytes,
    muon_parameters,
    newton_schulz_flops,
    temporary_bytes,
    update_flops,
)
from titan_moe.plan.pipeline.parts import RankPart, parts_of

MOE = MoEConfig(num_experts=5, top_k=2, ffn_hidden_size=8, shared_ffn_hidden_size=12, latent_size=20)
GQA = AttentionConfig(num_heads=9, num_kv_heads=3, head_dim=6, qk_norm=True, qkv_bias=True)
MLA = AttentionConfig(
    kind="mla", num_heads=3, kv_lora_rank=10, q_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8
)
MODEL = ModelConfig(
    name="odd", vocab_size=13, num_layers=3, num_dense_layers=1, hidden_size=24, ffn_hidden_size=28, moe=MOE
)
MUON = OptimConfig(kind="muon", muon=MuonConfig(ns_steps=3))


@pytest.mark.parametrize("attention", [GQA, MLA], ids=["gqa", "mla"])
def test_table_counts_what_muon_updates(attention: AttentionConfig) -> None:
    recipe = Recipe(model=replace(MODEL, attention=attention), optim=MUON)
    (part,) = parts_of(recipe, 1)
    model = Transformer(recipe.model, kernels=Kernels(experts="reference"))
    matrices = muon_matrices(model)
    assert not any(word in name for name in matrices.values() for word in ("router", "embed", "head", "norm", "bias"))
    assert muon_parameters(part) == sum(parameter.numel() for parameter in matrices)
    optimizers = build_optimizer([model], recipe.optim)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with FlopCounterMode(display=False) as counter:
        optimizers.step()
    assert counter.get_total_flops() == update_flops(part, by_halves=False)
    held = sum(value.nbytes for name, value in optimizers.state_dict().items() if not name.endswith(".step"))
    assert state_bytes(part) == held + 2 * 4 * sum(parameter.numel() for parameter in model.parameters())


def test_symmetric_products_are_computed_by_halves() -> None:
    whole = newton_schulz_flops(2048, 768, 5, by_halves=False)
    assert whole == 5 * (4 * 768**2 * 2048 + 2 * 768**3)
    tiles = 6 * 7 // 2 * 128**2  # of 768 rows, on and below the diagonal
    computed = newton_schulz_flops(768, 2048, 5, by_halves=True)
    assert computed == 5 * (2 * tiles * (2048 + 768) + 2 * 768**2 * 2048)
    assert 0.7 < computed / whole < 0.8
    assert newton_schulz_flops(8, 24, 3, by_halves=True) == newton_schulz_flops(8, 24, 3, by_halves=False)


def test_ranks_share_matrices_and_replicas_repeat_them() -> None:
    """By hand: three layers' projections over 2 · 2 ranks, experts over ep, then over edp."""
    model = replace(MODEL, attention=replace(GQA, num_heads=4, num_kv_heads=2), num_dense_layers=0)
    model = replace(model, moe=replace(MOE, num_experts=4, shared_ffn_hidden_size=0, latent_size=0))

    def part(world_size: int, **parallel: int) -> RankPart:
        layout = ParallelConfig(dispatcher="allgather", **parallel)  # type: ignore[arg-type]
        return parts_of(Recipe(model=model, optim=MUON, parallel=layout), world_size)[0]

    attention = [newton_schulz_flops(rows, 24, 3, by_halves=True) for rows in (24, 12, 12, 24)]  # q, k, v, out
    experts = [newton_schulz_flops(8, 24, 3, by_halves=True)] * 3
    assert update_flops(part(1)) == 3 * sum(attention) + 3 * 4 * sum(experts)
    assert exchanged_bytes(part(1)) == 0
    # 3 layers over 4 ranks: one has a layer at most; 2 experts a rank, which 2 ranks of edp share
    shared = part(4, dp_shard=2, tp=2, ep=2)
    assert update_flops(shared) == sum(attention) + 3 * sum(experts)
    assert muon_parameters(shared) == muon_parameters(part(1)) / 4
    of_attention, of_experts = (3 * 24 * (24 + 12 + 12 + 24) / 4, 3 * 4 * 3 * 8 * 24 / 4)
    assert exchanged_bytes(shared) == pytest.approx(4 * (of_attention * (1 / 2 + 1 / 2) + of_experts / 2))
    assert update_flops(part(4, dp_shard=1, dp_replicate=4)) == update_flops(part(1))
    local = part(4, dp_shard=4, ep=4)
    assert exchanged_bytes(local) == pytest.approx(4 * of_attention * 3 / 4), "whole experts stay where they are"
    assert temporary_bytes(local) > 0
    assert len(list(describe_muon([local]))) == 2
    assert not list(describe_muon(parts_of(replace(local.recipe, optim=OptimConfig()), 4)))
