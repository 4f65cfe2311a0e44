"""Layers that route by the ids of tokens train the same on every layout: ranks of tp and cp route parts of sequences,
and stages behind the first one get hidden states.

The machinery and the tolerance are those of test_one_loss.py.
"""

from dataclasses import replace
from typing import Any

import pytest
from support import load

from titan_moe.config import Recipe, check_rules
from titan_moe.config.mtp import MTPConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, MemoryConfig
from titan_moe.config.train import RunConfig

one_loss = load("distributed/test_one_loss")

STEPS = 2
PP2, CP2 = ParallelConfig(pp=2), ParallelConfig(cp=2)
EP2 = ParallelConfig(ep=2, dispatcher="alltoall")


def recipe_of(parallel: ParallelConfig, *, has_mtp: bool = False, **changes: Any) -> Recipe:
    """Layers 1 and 3 route by token, layer 2 by its scores."""
    base = one_loss.split_recipe(parallel, "gqa", run=RunConfig(device="cpu"), **changes)
    moe = replace(base.model.moe, hash_layers=(1, 3))
    mtp = MTPConfig(1, 0.3) if has_mtp else base.model.mtp
    train = replace(base.train, micro_batch_sequences=1 if parallel.pp_schedule == "dualpipev" else 2)
    return replace(base, model=replace(base.model, num_layers=4, moe=moe, mtp=mtp), train=train)


@pytest.fixture(scope="module")
def alone(ranks: Any) -> dict[bool, Any]:
    """One process, without and with multi-token prediction."""
    return {
        has_mtp: one_loss.run(ranks, 1, recipe_of(ParallelConfig(), has_mtp=has_mtp), -1, STEPS)[0]
        for has_mtp in (False, True)
    }


@pytest.mark.few("pp2-tp2-mtp")
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "has_mtp", "changes"),
    [
        pytest.param(4, replace(PP2, tp=2, vpp=2, pp_schedule="interleaved_1f1b"), True, {}, id="pp2-tp2-mtp"),
        pytest.param(4, replace(CP2, tp=2), False, {"memory": MemoryConfig("block")}, id="cp2-tp2-recompute"),
        pytest.param(2, replace(CP2, cp_kind="allgather"), False, {}, id="cp2-allgather"),
        pytest.param(2, replace(EP2, accumulate_unsharded=True, overlap="microbatch"), False, {}, id="overlap"),
        pytest.param(
            4,
            replace(EP2, pp=2, vpp=2, pp_schedule="dualpipev", overlap="microbatch", accumulate_unsharded=True),
            False,
            {},
            id="pp2-overlap",
        ),
    ],
)
def test_hash_layers_train_alike(
    ranks: Any, alone: dict[bool, Any], num_ranks: int, parallel: ParallelConfig, has_mtp: bool, changes: Any
) -> None:
    recipe = recipe_of(parallel, has_mtp=has_mtp, **changes)
    assert check_rules(recipe, num_ranks) == []
    expected = alone[has_mtp]
    for trace in one_loss.run(ranks, num_ranks, recipe, -1, STEPS):
        one_loss.assert_same(trace, expected, 1e-9)


@pytest.mark.few()
def test_hash_layers_train_alike_in_graphs(ranks: Any, alone: dict[bool, Any]) -> None:
    candidate = recipe_of(replace(EP2, dispatcher="allgather"), compile=CompileConfig("on"))
    for fields in ranks(2, one_loss.train_compiled, candidate, -1, STEPS):
        one_loss.assert_same(one_loss.Trace(**fields), alone[False], 1e-9)
