"""Adapters train on every layout as on one process, beside frozen weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import load
from torch.distributed.tensor import DTensor

from titan_moe.checkpoint import storage
from titan_moe.checkpoint.codes import codes_of
from titan_moe.checkpoint.manifest import Manifest
from titan_moe.checkpoint.masters import MasterState
from titan_moe.checkpoint.merged import factor_names
from titan_moe.checkpoint.read import load_weights_of
from titan_moe.config import Recipe
from titan_moe.config.adapter import AdapterConfig, AdapterOfKind
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, MemoryConfig
from titan_moe.config.rules import check_rules
from titan_moe.config.train import OptimConfig
from titan_moe.kernels.formats.casts import round_to
from titan_moe.kernels.formats.stored import numbers_reference
from titan_moe.parameters import SCALES, local
from titan_moe.plan.cost.memory import trained_of
from titan_moe.plan.pipeline.parts import parts_of
from titan_moe.training.build import assemble

one_loss = load("distributed/test_one_loss")
STEPS = 3
"""One factor is zero at first, so the other one has no gradient in the first step."""
ADAPTER = AdapterConfig(
    rank=4, alpha=6.0, targets=("attention", "dense", "shared", "experts"), experts=AdapterOfKind(2, 5.0)
)
EP2 = ParallelConfig(ep=2, dispatcher="alltoall")
PP2 = ParallelConfig(pp=2)


def adapted(parallel: ParallelConfig, **changes: Any) -> Recipe:
    plain = one_loss.recipe(parallel, **changes)
    attention = replace(plain.model.attention, num_heads=4, num_kv_heads=2)
    optim = OptimConfig(lr=1e-2, max_grad_norm=0.5, trainable=("*.router.weight", "layers.1.attention.out.weight"))
    return replace(plain, model=replace(plain.model, adapter=ADAPTER, attention=attention), optim=optim)


def with_codes(run: Recipe) -> Recipe:
    return replace(run, model=replace(run.model, adapter=replace(ADAPTER, base="fp8_rowwise")))


@pytest.fixture(scope="module")
def alone(ranks: Any) -> Any:
    return one_loss.Trace(**ranks(1, one_loss.train, adapted(ParallelConfig(), micro_batch_sequences=4), -1, STEPS)[0])


def test_factors_and_what_is_named_have_gradients(alone: Any) -> None:
    ends = {name.partition(".")[2].partition(".")[2] for name in alone.grads}
    linears = ("attention.qkv", "attention.out", "feed_forward.gate_up", "feed_forward.down")
    linears += ("feed_forward.shared_experts.gate_up", "feed_forward.shared_experts.down")
    assert ends == {f"{name}.adapter.{end}" for name in linears for end in "AB"} | {
        f"feed_forward.experts.{name}_{end}" for name in ("gate_up", "down") for end in "AB"
    } | {"feed_forward.router.weight", "attention.out.weight"}
    assert len(set(alone.losses)) == STEPS


@pytest.mark.parametrize(
    ("parallel", "what"),
    [
        pytest.param(EP2, "block", id="ep2-edp2-recompute_block"),
        pytest.param(replace(EP2, accumulate_unsharded=True, overlap="microbatch"), "experts", id="interleaved"),
        pytest.param(ParallelConfig(tp=2, ep=2, etp=2, dispatcher="alltoall"), "none", id="tp2-ep2-etp2"),
        pytest.param(ParallelConfig(etp=2), "none", id="etp2-edp2"),
        pytest.param(replace(EP2, dp_replicate=2), "none", id="hsdp2x2-ep2"),
        pytest.param(replace(PP2, ep=2, dispatcher="allgather"), "none", id="pp2-ep2"),
        pytest.param(
            replace(PP2, pp_schedule="zbv", vpp=2, pp_layout="Et||t|tL", accumulate_unsharded=True), "none", id="zbv"
        ),
    ],
)
def test_layouts_train_as_one_process(ranks, alone: Any, parallel: ParallelConfig, what: str) -> None:
    for trace in one_loss.run(ranks, 4, adapted(parallel, memory=MemoryConfig(what)), -1, STEPS):
        one_loss.assert_same(trace, alone, 1e-9)


@pytest.fixture(scope="module")
def alone_in_codes(ranks: Any) -> Any:
    one = with_codes(adapted(ParallelConfig(), micro_batch_sequences=4))
    return one_loss.Trace(**ranks(1, one_loss.train, one, -1, 2)[0])


@pytest.mark.few("pp2-ep2", "replicas")
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "is_compiled"),
    [
        pytest.param(4, ParallelConfig(dp_replicate=4), False, id="replicas"),
        pytest.param(2, replace(EP2, dispatcher="allgather"), True, id="ep2-compiled"),
        pytest.param(4, replace(PP2, ep=2, dispatcher="alltoall", accumulate_unsharded=True), False, id="pp2-ep2"),
        pytest.param(4, ParallelConfig(ep=4, cp=2, dispatcher="alltoall"), False, id="ep4-cp2"),
    ],
)
def test_codes_train_as_on_one_process(
    ranks, alone_in_codes: Any, num_ranks: int, parallel: ParallelConfig, is_compiled: bool
) -> None:
    """Experts have theirs on one rank of each replica, and linear layers on every rank."""
    if is_compiled:
        run = with_codes(adapted(parallel, compile=CompileConfig("on"), micro_batch_sequences=2))
        traces = [one_loss.Trace(**fields) for fields in ranks(2, one_loss.train_compiled, run, -1, 2, "eager")]
    else:
        run = with_codes(adapted(parallel, memory=MemoryConfig("block")))
        traces = one_loss.run(ranks, num_ranks, run, -1, 2)
    for trace in traces:
        one_loss.assert_same(trace, alone_in_codes, 1e-9)


def test_latents_of_own_heads_train_as_on_one_process(ranks) -> None:
    """Ranks of cp read their rows of factors, codes and scales."""
    sizes: Any = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}

    def of_latents(parallel: ParallelConfig, **changes: Any) -> Recipe:
        run = with_codes(adapted(parallel, **changes))
        attention = replace(run.model.attention, kind="mla", qk_norm=False, **sizes)
        return replace(run, model=replace(run.model, attention=attention))

    one = of_latents(ParallelConfig(), micro_batch_sequences=4)
    alone = one_loss.Trace(**ranks(1, one_loss.train, one, -1, 2)[0])
    many = of_latents(replace(EP2, cp=2))
    assert check_rules(many, 2) == []
    for trace in one_loss.run(ranks, 2, many, -1, 2):
        one_loss.assert_same(trace, alone, 1e-9)


def rounded(run: Recipe, folder: Path) -> tuple[int, int]:
    """The number of this rank's codes from a checkpoint without them, and of those that differ from its own weights."""
    plain = assemble(replace(run, model=replace(run.model, adapter=AdapterConfig())), torch.device("cpu")).parts
    storage.save(MasterState(plain).state_dict(), folder, Manifest({}, "", {}))
    parts, group = assemble(run, torch.device("cpu")).parts, dist.new_group(backend="gloo")
    load_weights_of(parts, folder, group, frozenset(factor_names(parts)))
    weights = {name: weight for part in plain for name, weight in part.named_parameters()}
    codes, different = codes_of(parts), 0
    for name in (name for name in codes if not name.endswith(SCALES)):
        numbers = numbers_reference(local(codes[name]), local(codes[f"{name}{SCALES}"]), torch.float32)
        values = local(weights[name].detach())[None].float()
        different += not numbers.equal(round_to(values, "fp8_rowwise", "weight", -1, power_of_two_scales=True)[0])
    return len(codes) // 2, different


def test_stages_with_unequal_layers_round_a_base(ranks, tmp_path: Path) -> None:
    """No rank waits for another: each reads its own layers."""
    run = with_codes(adapted(PP2))
    (first, wrong), (second, wrong_too) = ranks(2, rounded, run, tmp_path / "step-1")
    assert first != second and first and second and not wrong and not wrong_too


def test_frozen_routers_balance_as_on_one_process(ranks) -> None:
    """Their counts come from forward in blocks that run twice."""
    runs = adapted(ParallelConfig(), micro_batch_sequences=4), adapted(EP2, memory=MemoryConfig("block"))
    one, many = (replace(run, optim=replace(run.optim, trainable=())) for run in runs)
    alone = one_loss.Trace(**ranks(1, one_loss.train, one, -1, 2)[0])
    assert not any("router" in name for name in alone.grads)
    for fields in ranks(2, one_loss.train, many, -1, 2):
        one_loss.assert_same(one_loss.Trace(**fields), alone, 1e-9)


@pytest.mark.few()
def test_compiled_blocks_train_as_one_process(ranks, alone: Any) -> None:
    parallel = ParallelConfig(ep=2, dispatcher="allgather")
    candidate = adapted(parallel, compile=CompileConfig("on"), micro_batch_sequences=2)
    for fields in ranks(2, one_loss.train_compiled, candidate, -1, STEPS, "eager"):
        trace = one_loss.Trace(**fields)
        one_loss.assert_same(trace, alone, 1e-9)
        assert len(set(trace.num_graphs)) == 1, "all were made by the first step"


def trained_numbers(run: Recipe) -> int:
    """The numbers of this rank's part of what trains."""
    parts = assemble(run, torch.device("cpu")).parts
    return sum(local(parameter).numel() for part in parts for parameter in part.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    "parallel", [ParallelConfig(tp=2, ep=2, etp=2, dispatcher="alltoall"), replace(PP2, ep=2, dispatcher="allgather")]
)
def test_the_plan_counts_what_trains(ranks, parallel: ParallelConfig) -> None:
    run = adapted(parallel)
    counted = sum(map(trained_of, parts_of(run, 4))) * 4 / parallel.pp
    assert sum(ranks(4, trained_numbers, run)) == counted


def moments(run: Recipe) -> dict[str, tuple[float, float]]:
    """The size of both moments of this rank's part of each parameter after some steps."""
    assembly = assemble(run, torch.device("cpu"))
    for index in range(STEPS):
        batch = one_loss.batch_of(index, run.train.micro_batch_sequences, assembly.meshes, parallel=run.parallel)
        assembly.step(batch)
    (part,), (optimizer,) = assembly.parts, assembly.optimizers
    names = {parameter: name for name, parameter in part.named_parameters()}
    assert all(isinstance(parameter, DTensor) for parameter in optimizer.state)
    return {
        names[parameter]: tuple(local(state[name]).abs().sum().item() for name in ("exp_avg", "exp_avg_sq"))
        for parameter, state in optimizer.state.items()
    }


def test_moments_of_every_rank_move(ranks) -> None:
    """Under expert parallelism too, where each rank has other experts."""
    for of_rank in ranks(4, moments, adapted(EP2)):
        assert len([name for name in of_rank if ".experts." in name]) == 8
        assert all(first > 0 and second > 0 for first, second in of_rank.values())
