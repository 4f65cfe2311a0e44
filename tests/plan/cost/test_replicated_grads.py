"""The sum over tp of gradients of replicated parameters, against a model that is built and split, and its messages."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import load

from titan_moe.config import Recipe, load_recipe
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.config.train import RunConfig, TrainConfig
from titan_moe.models.transformer import Transformer
from titan_moe.parallel import grads, tensor
from titan_moe.parallel.grads import ReplicatedGrads
from titan_moe.parallel.mesh import build_meshes
from titan_moe.plan.check_report import describe
from titan_moe.plan.cost import replicated_grads
from titan_moe.plan.cost.count import count_parameters
from titan_moe.plan.cost.peak import peak_bytes
from titan_moe.plan.cost.replicated_grads import copied_bytes, flat_copy_bytes, received_bytes, replicated_elements
from titan_moe.plan.cost.roofline import sharding_bytes, step_work
from titan_moe.plan.pipeline.parts import RankPart, parts_of

RECIPES = Path(__file__).parents[3] / "recipes"
GQA = AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=16, qk_norm=True, qkv_bias=True, out_bias=True, sinks=True)
MLA = AttentionConfig(
    kind="mla", num_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, q_lora_rank=24
)
MOE = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=16, shared_ffn_hidden_size=16, latent_size=16)
MODEL = ModelConfig(
    vocab_size=64, num_layers=3, num_dense_layers=1, hidden_size=32, ffn_hidden_size=32, attention=GQA, moe=MOE
)
SPLIT_MODELS = {
    "norms, biases, latent": MODEL,
    "a shared key/value head": replace(MODEL, attention=replace(GQA, num_kv_heads=1, qk_norm_over="all_heads")),
    "mla": replace(MODEL, attention=MLA),
    "mla without query compression": replace(MODEL, attention=replace(MLA, q_lora_rank=0)),
    "gates, tied": replace(MODEL, embeddings_are_tied=True, moe=replace(MOE, shared_expert_gate=True)),
    "biases of experts": replace(MODEL, moe=replace(MOE, expert_mlp_bias=True, router_bias=True)),
    "dense, layer norms": replace(MODEL, norm="layer", head_bias=True, moe=MoEConfig(num_experts=0)),
}


def summed(model: ModelConfig, tp: int) -> tuple[int, int]:
    """Elements on meta of the parameters whose gradients a rank sums, and of all but the routed experts'."""
    with torch.device("meta"):
        built = Transformer(model)
    meshes = build_meshes(resolve(ParallelConfig(tp=tp), dist.get_world_size()), torch.device("cpu"))
    tensor.apply(built, ParallelConfig(tp=tp), meshes)
    held: dict[str, Any] = {name: each for name, each in built.named_parameters() if ".experts." not in name}
    replicated = ReplicatedGrads(held.values(), meshes.dense["tp"].get_group(), torch.float32).parameters
    return elements(replicated), elements(held.values())


def elements(parameters: Iterable[Any]) -> int:
    return sum(parameter.to_local().numel() for parameter in parameters)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", SPLIT_MODELS)
def test_counts_equal_a_model_that_is_split(ranks: Any, name: str, tp: int) -> None:
    count = count_parameters(SPLIT_MODELS[name], ParallelConfig(tp=tp))
    expected = (count.replicated_over_tp, count.dense_of_a_rank)
    assert ranks(tp, summed, SPLIT_MODELS[name], tp) == [expected] * tp


def recipe_of(parallel: ParallelConfig, **changes: Any) -> Recipe:
    train = TrainConfig(seq_len_tokens=16, micro_batch_sequences=1, global_batch_sequences=8)
    return load("distributed/test_one_loss").recipe(parallel, model=MODEL, train=train, **changes)


def messages_of_a_step(recipe: Recipe, limit: int) -> tuple[int, list[int]]:
    """The stage of this rank, and the bytes of the messages of its sum."""
    assembly = load("distributed/test_one_loss").assemble(recipe, torch.device("cpu"))
    (replicated,) = assembly.step.step.replicated
    for parameter in replicated.parameters:
        parameter.grad = torch.zeros_like(parameter)
    messages = []
    with (
        mock.patch.object(grads, "MESSAGE_ELEMENTS", limit),
        mock.patch.object(dist, "all_reduce", lambda flat, group: messages.append(flat.nbytes)),
    ):
        replicated.sum()
    return assembly.meshes.dense.get_local_rank("pp"), messages


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ParallelConfig(tp=2, ep=4, dispatcher="alltoall"), id="dp2-tp2-ep4"),
        pytest.param(ParallelConfig(pp=2, tp=2), id="pp2-tp2"),
    ],
)
def test_bytes_equal_the_messages_of_a_step(ranks: Any, parallel: ParallelConfig) -> None:
    """In fp64; of the shards that FSDP leaves, and of a pipeline those of the rank's layers."""
    recipe = recipe_of(parallel)
    parts = parts_of(recipe, 4)
    for stage, messages in ranks(4, messages_of_a_step, recipe, replicated_grads.MESSAGE_ELEMENTS):
        assert messages == [flat_copy_bytes(parts[stage])] and messages[0] > 0
        assert received_bytes(parts[stage]) == messages[0], "2 (tp - 1) / tp of it"
    for stage, messages in ranks(4, messages_of_a_step, recipe, 300):
        assert len(messages) > 1 and sum(messages) == 8 * replicated_elements(parts[stage])
        with mock.patch.object(replicated_grads, "MESSAGE_ELEMENTS", 300):
            assert max(messages) <= max(flat_copy_bytes(parts[stage]), 8 * 32 * 32), "a compression alone"


def test_a_larger_gradient_is_a_message_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated_grads, "MESSAGE_ELEMENTS", 300)
    assert flat_copy_bytes(RankPart(recipe_of(ParallelConfig(tp=2)), 4)) == 8 * 300
    shared = replace(recipe_of(ParallelConfig(tp=2)), model=SPLIT_MODELS["a shared key/value head"])
    assert flat_copy_bytes(RankPart(shared, 4)) == 8 * (8 + 2) * 16 * 32 / 2, "the projection, over two shards"


@pytest.mark.parametrize("reduce", ["bf16", "fp32"])
def test_the_step_has_the_sum(reduce: Any) -> None:
    """Wire, copies and the third peak of memory."""
    qwen = load_recipe(RECIPES / "qwen3_30b_a3b.toml", ["--parallel.tp=4", f"--precision.reduce={reduce}"])
    part, m, size = RankPart(qwen, 8), qwen.model, {"bf16": 2, "fp32": 4}[reduce]
    norms, routers = (2 * 48 + 1) * 2048 + 48 * 2 * 128, 48 * 128 * 2048
    assert (m.num_layers, m.hidden_size, m.moe.num_experts, m.attention.head_dim) == (48, 2048, 128, 128)
    number = (norms + routers) / 2  # two shards
    assert flat_copy_bytes(part) == number * size and received_bytes(part) == 2 * 3 / 4 * number * size
    sharding = step_work(qwen, 8)["sharding"]
    assert sharding.wire_bytes == sharding_bytes(part) + received_bytes(part)
    assert sharding.memory_bytes == copied_bytes(part) == number * (4 + size + size + 4)
    assert f"{number * size / 2**20:.3g} MiB, {1.5 * number * size / 2**20:.3g} MiB received" in describe(qwen, 8)
    assert "on every tp rank" not in describe(replace(qwen, parallel=replace(qwen.parallel, tp=1)), 8)


def test_the_copy_is_in_the_peak_where_it_is_largest() -> None:
    """After the last backward activations and gathered parameters are gone: few tokens, wide latent projections."""
    model = replace(MODEL, vocab_size=8, moe=replace(MOE, num_experts=2, ffn_hidden_size=2, latent_size=4096))
    small = replace(recipe_of(ParallelConfig(tp=2)), model=model, run=RunConfig(device="cuda"))
    part = RankPart(replace(small, train=replace(small.train, seq_len_tokens=2)), 2)
    copy = flat_copy_bytes(part)
    assert copy > 8 * 2 * 2 * 32 * 4096
    with mock.patch("titan_moe.plan.cost.peak.flat_copy_bytes", lambda part: 2 * copy):
        more = peak_bytes(part, 1.0)
    assert more - peak_bytes(part, 1.0) == copy
