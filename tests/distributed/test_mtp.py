"""Multi-token prediction trains the same on every layout: gradients, losses, those of depths, counts of its routers.

The machinery and the tolerance are those of test_one_loss.py. Sequences are split over cp and tp, so that tokens ahead
are on other ranks, and documents end anywhere.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support import load

from titan_moe.config import Recipe, check_rules
from titan_moe.config.mtp import MTPConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import MemoryConfig
from titan_moe.config.train import RunConfig
from titan_moe.training.build import assemble

one_loss = load("distributed/test_one_loss")

STEPS = 2
TWO, REPEATED = MTPConfig(2, 0.3), MTPConfig(3, 0.3, repeats_layer=True)
PP2, ZBV = ParallelConfig(pp=2), ParallelConfig(pp=2, pp_schedule="zbv", vpp=2, accumulate_unsharded=True)
CP2, TP2 = ParallelConfig(cp=2), ParallelConfig(tp=2)
EP2 = ParallelConfig(ep=2, dispatcher="alltoall")


def recipe_of(parallel: ParallelConfig, model: str, mtp: MTPConfig, **changes: Any) -> Recipe:
    base = one_loss.split_recipe(parallel, model, run=RunConfig(device="cpu"), **changes)
    train = replace(base.train, micro_batch_sequences=2)
    return replace(base, model=replace(base.model, mtp=mtp, num_layers=4), train=train)


@pytest.fixture(scope="module")
def alone(ranks: Any) -> Callable[..., Any]:
    """One process, by model, and whether documents are kept apart."""

    @cache
    def train(model: str, mtp: MTPConfig, cp_kind: str = "ulysses") -> Any:
        return one_loss.run(ranks, 1, recipe_of(ParallelConfig(cp_kind=cp_kind), model, mtp), -1, STEPS)[0]

    return train


@pytest.mark.few("tp2-tied", "pp2-cp2", "pp2-tied-own_stage", "zbv-repeated")
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "model", "mtp", "changes"),
    [
        pytest.param(2, EP2, "gqa", TWO, {}, id="ep2"),
        pytest.param(2, CP2, "mla", TWO, {}, id="cp2"),
        pytest.param(2, replace(CP2, cp_kind="allgather"), "mla", TWO, {}, id="cp2-allgather"),
        pytest.param(2, replace(CP2, cp_kind="ring"), "gqa", TWO, {"memory": MemoryConfig("block")}, id="cp2-ring"),
        pytest.param(2, TP2, "gqa-tied", TWO, {"memory": one_loss.OF_GQA}, id="tp2-tied"),
        pytest.param(4, replace(CP2, tp=2, ep=2, dispatcher="alltoall"), "gqa", TWO, {}, id="tp2-cp2"),
        pytest.param(4, replace(EP2, dp_replicate=2, accumulate_unsharded=True), "gqa", TWO, {}, id="unsharded"),
        pytest.param(2, replace(EP2, ep=1), "mla", REPEATED, {"memory": MemoryConfig("block")}, id="dp2-repeated"),
        pytest.param(2, replace(EP2, accumulate_unsharded=True), "gqa", REPEATED, {}, id="unsharded-repeated"),
        pytest.param(2, PP2, "gqa", TWO, {}, id="pp2"),
        pytest.param(4, replace(PP2, cp=2, cp_kind="allgather"), "mla", TWO, {}, id="pp2-cp2"),
        pytest.param(4, replace(PP2, tp=2, vpp=2, pp_schedule="interleaved_1f1b"), "gqa", TWO, {}, id="pp2-tp2"),
        pytest.param(2, replace(PP2, pp_layout="Etttt|mmL"), "gqa-tied", TWO, {}, id="pp2-tied-own_stage"),
        pytest.param(2, replace(ZBV, pp_layout="Et|tt|t|mL"), "gqa", REPEATED, {}, id="zbv-repeated"),
        pytest.param(2, ZBV, "mla", TWO, {}, id="zbv"),
    ],
)
def test_mtp_trains_alike(
    ranks: Any,
    alone: Callable[..., Any],
    num_ranks: int,
    parallel: ParallelConfig,
    model: str,
    mtp: MTPConfig,
    changes: Any,
) -> None:
    recipe = recipe_of(parallel, model, mtp, **changes)
    assert check_rules(recipe, num_ranks) == []
    expected = alone(model, mtp, "ring") if parallel.cp_kind == "ring" else alone(model, mtp)
    assert all(len(losses) == mtp.num_depths and all(losses.values()) for losses in expected.mtp_losses)
    for trace in one_loss.run(ranks, num_ranks, recipe, -1, STEPS):
        one_loss.assert_same(trace, expected, 1e-9)


@pytest.mark.few("pp2")
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "mtp", "sizes"),
    [
        pytest.param(2, PP2, TWO, (one_loss.SEQUENCES, 2), id="pp2"),
        pytest.param(1, ParallelConfig(), REPEATED, (one_loss.SEQUENCES, 2), id="repeated"),
        pytest.param(2, TP2, TWO, (2, 4), id="tp2"),
    ],
)
def test_its_routers_are_balanced_over_the_batch_of_a_step(
    ranks: Any, num_ranks: int, parallel: ParallelConfig, mtp: MTPConfig, sizes: tuple[int, int]
) -> None:
    """With one microbatch, whose layers sum the loads in forward, and with several, which are counted ahead."""
    recipes = []
    for layout, size in zip((ParallelConfig(), parallel), sizes, strict=True):
        recipe = recipe_of(layout, "gqa", mtp)
        model, train = replace(recipe.model, moe=one_loss.KINDS.moe), replace(recipe.train, micro_batch_sequences=size)
        recipes.append(replace(recipe, model=model, train=train))
    one, several = recipes
    assert check_rules(several, num_ranks) == []
    (expected,) = one_loss.run(ranks, 1, one, -1, 1)
    for trace in one_loss.run(ranks, num_ranks, several, -1, 1):
        one_loss.assert_same(trace, expected, 1e-9)


@pytest.mark.few()
@pytest.mark.parametrize(
    ("parallel", "memory"),
    [
        pytest.param(CP2, MemoryConfig("experts"), id="cp2"),
        pytest.param(TP2, MemoryConfig("block"), id="tp2-recompute_block"),
        pytest.param(PP2, one_loss.OF_GQA, id="pp2-recompute_parts"),
    ],
)
def test_mtp_trains_alike_in_graphs(
    ranks: Any, alone: Callable[..., Any], parallel: ParallelConfig, memory: MemoryConfig
) -> None:
    layout = replace(parallel, ep=max(parallel.cp, parallel.tp), dispatcher="allgather")
    if parallel.pp > 1:
        layout = parallel
    candidate = recipe_of(layout, "gqa", TWO, compile=one_loss.COMPILED, memory=memory)
    grads: dict[str, Any] = {}
    traces = [one_loss.Trace(**fields) for fields in ranks(2, one_loss.train_compiled, candidate, -1, STEPS)]
    for trace in traces:
        grads |= trace.grads
    for trace in traces:
        trace.grads = grads
        one_loss.assert_same(trace, alone("gqa", TWO), 1e-9)
        assert len(set(trace.num_graphs)) == 1, "all were made by the first step"


def losses_after_validation(run: Recipe, validates: bool) -> dict[str, float]:
    """The losses of a step with other weights than those of a forward before it."""
    meshes, model, parts, *_, runner = assemble(run, torch.device("cpu"))
    batch = one_loss.batch_of(0, 2, meshes, parallel=run.parallel)
    if validates:
        with torch.no_grad():
            model(batch.tokens_MBN[0], batch.labels_MBN[0])
    with torch.no_grad():
        for part in parts:
            for name, parameter in part.named_parameters():
                if "layers.4." in name:
                    parameter.mul_(1.5)
    return {name: loss.item() for name, loss in runner(batch).metrics.items() if "loss" in name}


@pytest.mark.parametrize("parallel", [pytest.param(ParallelConfig(), id="dp2")])
def test_a_forward_without_mtp_leaves_none_of_its_weights_gathered(ranks: Any, parallel: ParallelConfig) -> None:
    run = recipe_of(parallel, "gqa", TWO)
    plain, validated = (ranks(2, losses_after_validation, run, validates) for validates in (False, True))
    assert plain == validated and plain[0].keys() >= {"loss", "mtp_loss/1", "mtp_loss/2"}
