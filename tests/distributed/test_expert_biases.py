"""Experts with biases train on every layout as on one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import load
from torch.distributed.tensor import DTensor

from titan_moe.config import Recipe
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, MemoryConfig
from titan_moe.training.build import assemble

one_loss = load("distributed/test_one_loss")
STEPS = 2
"""Biases start at zero: the second step is the first that depends on them."""
EP2 = ParallelConfig(ep=2, dispatcher="alltoall")
BIASES = {
    f"layers.{layer}.feed_forward.experts.{name}": shape
    for layer in (1, 2)
    for name, shape in (("gate_up_bias", (8, 2, 8)), ("down_bias", (8, 16)))
}


def with_biases(parallel: ParallelConfig, **changes: Any) -> Recipe:
    plain = one_loss.recipe(parallel, **changes)
    return replace(plain, model=replace(plain.model, moe=replace(plain.model.moe, expert_mlp_bias=True)))


@pytest.fixture(scope="module")
def alone(ranks: Any) -> Any:
    one = with_biases(ParallelConfig(), micro_batch_sequences=4)
    return one_loss.Trace(**ranks(1, one_loss.train, one, -1, STEPS)[0])


def test_biases_learn(alone: Any) -> None:
    assert {name: tuple(grad.shape) for name, grad in alone.grads.items() if name in BIASES} == BIASES
    assert all(alone.grads[name].flatten(1).any(1).all() for name in BIASES), "every expert's"


@pytest.mark.few("interleaved", "etp2-edp2", "ep2-etp2-clones-recompute_experts")
@pytest.mark.parametrize(
    ("parallel", "what"),
    [
        pytest.param(EP2, "none", id="ep2-edp2"),
        pytest.param(replace(EP2, accumulate_unsharded=True, overlap="microbatch"), "none", id="interleaved"),
        pytest.param(ParallelConfig(etp=2), "none", id="etp2-edp2"),
        pytest.param(replace(EP2, etp=2, expert_clones="auto"), "experts", id="ep2-etp2-clones-recompute_experts"),
    ],
)
def test_layouts_train_as_one_process(ranks, alone: Any, parallel: ParallelConfig, what: str) -> None:
    for fields in ranks(4, one_loss.train, with_biases(parallel, memory=MemoryConfig(what)), -1, STEPS):
        one_loss.assert_same(one_loss.Trace(**fields), alone, 1e-9)


@pytest.mark.few()
def test_compiled_experts_train_as_one_process(ranks, alone: Any) -> None:
    parallel = ParallelConfig(etp=2, dispatcher="allgather")
    candidate = with_biases(parallel, compile=CompileConfig("on"), micro_batch_sequences=2)
    for fields in ranks(2, one_loss.train_compiled, candidate, -1, STEPS, "eager"):
        trace = one_loss.Trace(**fields)
        one_loss.assert_same(trace, alone, 1e-9)
        assert len(set(trace.num_graphs)) == 1, "all were made by the first step"


def local_shapes(run: Recipe) -> tuple[dict[str, tuple[int, ...]], list[set[str]]]:
    """What lies on this rank of the experts' parameters; and the biases by group of the optimizer."""
    assembly = assemble(run, torch.device("cpu"))
    (model,) = assembly.parts
    parameters = {name: parameter for name, parameter in model.named_parameters() if ".1.feed_forward.experts." in name}
    assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
    shapes = {name.rpartition(".")[2]: tuple(p.to_local().shape) for name, p in parameters.items()}
    decays = {
        id(p): group["weight_decay"]
        for opt in assembly.optimizers
        for group in opt.param_groups
        for p in group["params"]
    }
    return shapes, [
        {name.rpartition(".")[2] for name, p in parameters.items() if bool(decays[id(p)]) == decayed}
        for decayed in (False, True)
    ]


def test_biases_are_sharded_and_do_not_decay(ranks) -> None:
    for shapes, (spared, decayed) in ranks(4, local_shapes, with_biases(EP2)):
        assert shapes == {"gate_up": (4, 2, 8, 8), "down": (4, 8, 8), "gate_up_bias": (4, 2, 4), "down_bias": (4, 8)}
        assert spared == {"gate_up_bias", "down_bias"} and decayed == {"gate_up", "down"}


def test_etp_splits_the_hidden_width_and_keeps_the_down_bias_whole(ranks) -> None:
    for shapes, _ in ranks(4, local_shapes, with_biases(ParallelConfig(ep=2, etp=2, dispatcher="alltoall"))):
        assert shapes == {"gate_up": (4, 2, 4, 16), "down": (4, 16, 4), "gate_up_bias": (4, 2, 4), "down_bias": (4, 16)}
    for shapes, _ in ranks(4, local_shapes, with_biases(ParallelConfig(etp=2))):  # FSDP shards over edp
        assert shapes == {"gate_up": (8, 2, 4, 8), "down": (8, 8, 4), "gate_up_bias": (8, 2, 2), "down_bias": (8, 8)}
