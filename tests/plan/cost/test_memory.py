"""Memory of a rank, against manual arithmetic."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from titan_moe.config import Recipe
from titan_moe.config.clones import num_clones
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import MemoryConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.recipe import max_batch_tokens
from titan_moe.config.train import MetricsConfig
from titan_moe.kernels.symm_mem.arrays import symm_bytes
from titan_moe.kernels.symm_mem.clones import clone_bytes
from titan_moe.plan.check_report import describe
from titan_moe.plan.cost.count import count_parameters
from titan_moe.plan.cost.memory import shared_bytes_per_rank, state_bytes
from titan_moe.plan.resolved import Resolved

MODEL = ModelConfig(num_layers=2, hidden_size=64, moe=MoEConfig(num_experts=8, ffn_hidden_size=32))


@pytest.mark.parametrize("master", ["fp32", "bf16", "fp64"])
def test_state_bytes_have_the_average_of_weights(master: Any) -> None:
    recipe = Recipe(model=MODEL, precision=PrecisionConfig(master=master))
    averaged = replace(recipe, optim=replace(recipe.optim, ema_decay=0.9))
    (own,), (with_average,) = Resolved(recipe, 1).parts, Resolved(averaged, 1).parts
    own_bytes = 8 if master == "fp64" else 4
    assert state_bytes(with_average) - state_bytes(own) == own_bytes * count_parameters(MODEL).total


def test_state_bytes_have_the_tables_of_hash_layers_on_their_stage() -> None:
    plain = Recipe(model=replace(MODEL, num_layers=4), parallel=ParallelConfig(pp=2))
    hashed = replace(plain, model=replace(plain.model, moe=replace(MODEL.moe, hash_layers=(0, 1))))
    pairs = zip(Resolved(hashed, 2).parts, Resolved(plain, 2).parts, strict=True)
    table = 4 * MODEL.vocab_size * MODEL.moe.top_k
    assert [state_bytes(own) - state_bytes(without) for own, without in pairs] == [2 * table, 0]
    assert "softmax scores, 2 layers by token id (0.00391 MiB of tables)" in describe(hashed, 2)


@pytest.mark.parametrize(
    ("parallel", "world_size", "dense_ranks", "expert_ranks"),
    [
        (ParallelConfig(), 1, 1, 1),
        (ParallelConfig(ep=4), 8, 8, 8),  # ep 4, edp 2
        (ParallelConfig(dp_replicate=2, ep=2), 8, 4, 4),  # replicas divide nothing
        (ParallelConfig(dp_shard=1, dp_replicate=8), 8, 1, 1),
        (ParallelConfig(cp=4, ep=4), 8, 8, 8),  # dp_shard 2
        (ParallelConfig(dp_replicate=2, cp=4, ep=2), 8, 4, 4),
    ],
)
def test_state_bytes_are_divided_by_the_shards(
    parallel: ParallelConfig, world_size: int, dense_ranks: int, expert_ranks: int
) -> None:
    parameters = count_parameters(MODEL)
    dense = (parameters.total - parameters["experts"]) / dense_ranks
    expected = 16 * (dense + parameters["experts"] / expert_ranks)
    recipe = Recipe(model=MODEL, parallel=parallel)
    assert Resolved(recipe, world_size).state_bytes == pytest.approx(expected)
    halved = replace(recipe, precision=replace(recipe.precision, master="bf16"))
    assert Resolved(halved, world_size).state_bytes == pytest.approx(expected / 2)


def test_state_bytes_of_tensor_parallel_ranks() -> None:
    parameters = count_parameters(MODEL)
    whole = parameters["norms"] + parameters["router"]  # the default attention has no norms and no biases
    dense = whole + (parameters.total - parameters["experts"] - whole) / 4
    recipe = Recipe(model=MODEL, parallel=ParallelConfig(tp=4, ep=8))
    assert Resolved(recipe, 8).state_bytes == pytest.approx(16 * (dense / 2 + parameters["experts"] / 8))


@pytest.mark.parametrize(
    ("precision", "park", "expected", "on_host"),
    [
        (PrecisionConfig(master="fp32_split", moments="bf16"), "none", 2 + 2 + 4 + 4, 0),
        (PrecisionConfig(master="fp32_split", moments="bf16", gradients="bf16"), "none", 2 + 2 + 2 + 4, 0),
        (PrecisionConfig(master="bf16", gradients="fp32"), "none", 2 + 4 + 4, 0),
        (PrecisionConfig(moments="bf16"), "moments", 4 + 4, 4),
        (PrecisionConfig(master="fp32_split", moments="bf16"), "states", 2 + 4, 2 + 4),
    ],
)
def test_state_bytes_of_split_masters_and_parked_states(
    precision: PrecisionConfig, park: Any, expected: int, on_host: int
) -> None:
    resolved = Resolved(Recipe(model=MODEL, precision=precision, memory=MemoryConfig(park=park)), 1)
    total = count_parameters(MODEL).total
    assert (resolved.state_bytes, resolved.parked_bytes) == (expected * total, on_host * total)
    assert (resolved.gathered_bytes == 0) == (precision.parameters == "bf16"), "weights in bf16 need no copies"
    assert ("GiB on the host" in describe(resolved.recipe, 1)) == (park != "none")


def test_gathered_bytes_of_unsharded_accumulation() -> None:
    parameters = count_parameters(MODEL)
    recipe = Recipe(model=MODEL, parallel=ParallelConfig(ep=4))
    assert Resolved(recipe, 8).gathered_bytes == 0 and "during a step" not in describe(recipe, 8)
    once = replace(recipe, parallel=replace(recipe.parallel, accumulate_unsharded=True))
    whole = parameters.total - parameters["experts"] + parameters["experts"] / 4
    assert Resolved(once, 8).gathered_bytes == pytest.approx((2 + 4) * whole)  # bf16 and fp32
    assert "of unsharded parameters and gradients during a step" in describe(once, 8)
    dense = parameters.total - parameters["experts"]  # on 4 ranks experts are whole: copies alone come on top
    assert Resolved(once, 4).gathered_bytes == pytest.approx((2 + 4) * dense + 2 * parameters["experts"] / 4)


def test_gathered_bytes_of_what_is_not_resharded_after_forward() -> None:
    count = count_parameters(MODEL)
    experts = count["experts"] / 4
    for dense_stays, experts_stay in ((True, True), (False, True), (True, False)):
        parallel = ParallelConfig(
            ep=4, reshard_after_forward=not dense_stays, reshard_experts_after_forward=not experts_stay
        )
        recipe = Recipe(model=MODEL, parallel=parallel)
        whole = dense_stays * (count.total - count["experts"]) + experts_stay * experts
        assert Resolved(recipe, 8).gathered_bytes == pytest.approx(2 * whole), "parameters in bf16, no gradients"
        assert "of unsharded parameters during a step" in describe(recipe, 8)


def test_gathered_bytes_of_copies_of_unsharded_experts() -> None:
    copies = 2 * count_parameters(MODEL)["experts"] / 4
    recipe = Recipe(model=MODEL, parallel=ParallelConfig(ep=4))
    assert Resolved(recipe, 4).gathered_bytes == pytest.approx(copies)
    assert "of experts in bf16 during a step" in describe(recipe, 4)
    for recompute in ("expert_weights", "block"):
        again = replace(recipe, memory=MemoryConfig(recompute=(recompute,)))
        assert Resolved(again, 4).gathered_bytes == pytest.approx(copies / MODEL.num_moe_layers), "those of a layer"
    for changed in ({"master": "bf16", "reduce": "bf16"}, {"master": "bf16", "reduce": "fp32"}):
        assert Resolved(replace(recipe, precision=PrecisionConfig(**changed)), 4).gathered_bytes == 0


@pytest.mark.parametrize(
    ("master", "moments", "expected"),
    [
        ("fp32", "bf16", 12),
        ("bf16", "fp32", 12),
        ("fp32", "master", 16),
        ("fp32", "fp8", 10 + 1 / 32),
        ("bf16", "fp8", 6 + 1 / 32),
    ],
)
def test_state_bytes_by_dtype_of_moments(master: Any, moments: Any, expected: int) -> None:
    recipe = Recipe(model=MODEL, precision=PrecisionConfig(master=master, moments=moments))
    assert Resolved(recipe, 1).state_bytes == pytest.approx(expected * count_parameters(MODEL).total, abs=1)
    page = describe(recipe, 1)
    assert (f"parameters and gradients in {master}, moments in {moments}" in page) == (moments != "master")


@pytest.mark.parametrize(("compute", "scores"), [("bf16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")])
def test_shared_bytes_are_what_the_dispatcher_opens(compute: Any, scores: str) -> None:
    recipe = Recipe(
        model=MODEL, parallel=ParallelConfig(ep=4, dispatcher="alltoall"), precision=PrecisionConfig(compute)
    )
    assert shared_bytes_per_rank(recipe) == 0 and "ranks share" not in describe(recipe, 4)
    recipe = replace(recipe, parallel=replace(recipe.parallel, dispatcher="symm_mem"))
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    opened = symm_bytes(4, 8 * 256, 64, MODEL.moe.top_k, dtypes[compute], dtypes[scores])
    assert shared_bytes_per_rank(recipe) == pytest.approx(opened, abs=1024)
    assert "GiB of memory that ranks share" in describe(recipe, 4)


def test_shared_bytes_hold_the_weights_of_clones() -> None:
    few_tokens = replace(Recipe().train, seq_len_tokens=8, micro_batch_sequences=1)
    recipe = Recipe(
        model=MODEL,
        parallel=ParallelConfig(ep=4, dispatcher="symm_mem"),
        precision=PrecisionConfig("bf16"),
        metrics=MetricsConfig(sample_tokens=0),
        train=few_tokens,
    )
    moe, rows = MODEL.moe, shared_bytes_per_rank(recipe)
    lending = replace(recipe, parallel=replace(recipe.parallel, expert_clones="auto"))
    elements = 3 * MODEL.hidden_size * moe.ffn_hidden_size
    opened = clone_bytes(4, moe.num_experts // 4, num_clones(lending), elements, torch.bfloat16)
    assert opened > rows and shared_bytes_per_rank(lending) == pytest.approx(opened, abs=1024)


def test_max_batch_tokens_may_be_the_sample() -> None:
    recipe = Recipe(model=MODEL)
    assert max_batch_tokens(recipe) == 8 * 256
    assert max_batch_tokens(replace(recipe, metrics=MetricsConfig(sample_tokens=5000))) == 64 + 5000
    short = replace(recipe.train, seq_len_tokens=16, micro_batch_sequences=1)
    assert max_batch_tokens(replace(recipe, train=short, metrics=MetricsConfig(sample_tokens=10))) == 16 + 10
