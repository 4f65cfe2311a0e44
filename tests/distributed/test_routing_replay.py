"""The experts of a step are recorded, and replayed under other layouts: the gradients of one process."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from support import load
from torch import Tensor

from titan_moe.config import Recipe
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import MemoryConfig
from titan_moe.data.packing import Batch
from titan_moe.parallel.pipeline.rehearsal import Rehearsals
from titan_moe.training import step_runner
from titan_moe.training.build import assemble

one_loss = load("distributed/test_one_loss")
SEQUENCES, TOKENS, MODEL, MOE = one_loss.SEQUENCES, one_loss.TOKENS, one_loss.MODEL, one_loss.MOE
EP2 = ParallelConfig(ep=2, dispatcher="alltoall")
PLAIN = MemoryConfig()
RUNS = {
    "tp2-ep2-recompute": (replace(EP2, tp=2), MemoryConfig("block")),
    "cp2-ep2": (replace(EP2, cp=2, cp_kind="allgather"), PLAIN),
    "pp2-recompute": (ParallelConfig(pp=2), MemoryConfig("block")),
    "ep2-interleaved": (replace(EP2, overlap="microbatch", accumulate_unsharded=True), PLAIN),
}
MICRO_BATCH = 2


def of_runs(parallel: ParallelConfig, memory: MemoryConfig = PLAIN) -> Recipe:
    attention = replace(one_loss.ATTENTION, num_heads=4, num_kv_heads=2)
    model = replace(MODEL, num_layers=4, attention=attention)
    return one_loss.recipe(parallel, model=model, memory=memory, micro_batch_sequences=MICRO_BATCH)


def given_ids() -> Tensor:
    """Of every sequence, any experts: of some tokens in some layers only."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(SEQUENCES, TOKENS, 4, MOE.num_experts, generator=generator)
    ids = scores.topk(MOE.top_k).indices.int()
    ids[torch.rand(ids.shape[:3], generator=generator) < 0.3] = -1
    return ids


def step(recipe: Recipe, ids_BNLK: Tensor) -> dict[str, Any]:
    """Loss, gradients, counts and all experts of a step with these experts."""
    meshes, _, parts, _, _, runner = assemble(recipe, torch.device("cpu"))
    batch = one_loss.batch_of(0, MICRO_BATCH, meshes, parallel=recipe.parallel)
    mine = ids_BNLK.chunk(meshes.sizes.dp)[meshes.data_rank]
    own = mine[:, one_loss.own_tokens(meshes, recipe.parallel)]
    grads: dict[str, Tensor] = {}
    rehearses = mock.patch.object(Rehearsals, "is_due", lambda *_: recipe.parallel.pp > 1)  # as before compiled steps
    with rehearses, one_loss.observing_gradients(runner.step, parts, grads):
        result = runner(batch._replace(topk_ids_MBNLK=own.unflatten(0, (-1, MICRO_BATCH))))
    counts = {name: counts.tolist() for name, counts in result.tokens_per_expert.items()}
    taken = whole_ids(result.topk_ids_MBNLK.flatten(0, 1), meshes, recipe.parallel)
    return {"loss": result.loss.item(), "grads": grads, "counts": counts, "ids": taken}


def whole_ids(ids_BnLK: Tensor, meshes: Any, parallel: ParallelConfig) -> Tensor:
    """Those of all sequences and tokens, -1 where another rank of dp or cp has them."""
    ids = torch.full((SEQUENCES, TOKENS, *ids_BnLK.shape[2:]), -1, dtype=torch.int32)
    mine = ids.chunk(meshes.sizes.dp)[meshes.data_rank]
    mine[:, one_loss.own_tokens(meshes, parallel)] = ids_BnLK
    return ids


def steps(recipes: Sequence[Recipe], ids_BNLK: Tensor) -> list[dict[str, Any]]:
    return [step(recipe, ids_BNLK) for recipe in recipes]


@pytest.fixture(scope="module")
def alone(ranks: Any) -> Any:
    """One process, which is given some experts, and then all that it took."""
    recipe = of_runs(ParallelConfig())
    (runs,) = ranks(1, steps, [recipe], given_ids())
    ((again,),) = ranks(1, steps, [recipe], runs[0]["ids"])
    assert again["loss"] == runs[0]["loss"] and torch.equal(again["ids"], runs[0]["ids"])
    assert all(torch.equal(again["grads"][name], grad) for name, grad in runs[0]["grads"].items())
    return runs[0]


def test_every_layout_records_and_replays_the_experts_of_its_tokens(ranks: Any, alone: Any) -> None:
    given = given_ids()
    is_given = given[:, :, 1:] >= 0  # the first layer is dense
    assert torch.equal(alone["ids"][:, :, 1:][is_given], given[:, :, 1:][is_given])
    assert (alone["ids"][:, :, 0] == -1).all() and (alone["ids"][:, :, 1:] >= 0).all()
    by_rank = ranks(2, steps, [of_runs(*run) for run in RUNS.values()], given)
    for name, *runs in zip(RUNS, *by_rank, strict=True):
        grads = {key: grad for run in runs for key, grad in run["grads"].items()}
        assert grads.keys() == alone["grads"].keys(), name
        for key, grad in alone["grads"].items():
            torch.testing.assert_close(grads[key], grad, rtol=1e-9, atol=1e-9, msg=f"{name}: {key}")
        for run in runs:
            assert run["loss"] == pytest.approx(alone["loss"], rel=1e-9), name
            assert run["counts"].items() <= alone["counts"].items(), name
        taken = torch.stack([run["ids"] for run in runs])
        assert torch.equal(taken.amax(0).sort().values, alone["ids"].sort().values), name


def graph_steps(is_captured: bool) -> list[tuple[float, Tensor | None]]:
    """Losses and experts of steps that replay experts, record all, and neither."""
    recorder = load("training/test_step_runner").Repeater
    run = assemble(of_runs(ParallelConfig()), torch.device("cpu")).step
    runner = step_runner.StepRunner(run.step, run.schedule, is_captured, recorder)
    batch: Batch = one_loss.batch_of(0, SEQUENCES)
    seen = []
    for ids in (given_ids(), given_ids(), given_ids(), given_ids().flip(0), torch.full_like(given_ids(), -1)):
        result = runner(batch._replace(topk_ids_MBNLK=ids[None]))
        seen.append((result.loss.item(), result.topk_ids_MBNLK.clone()))
    assert runner.num_recordings == is_captured
    return seen


def test_a_recorded_step_is_replayed_with_the_experts_of_each_batch(ranks: Any) -> None:
    (captured,), (launched,) = (ranks(1, graph_steps, is_captured) for is_captured in (True, False))
    for (loss, ids), (expected_loss, expected_ids) in zip(captured, launched, strict=True):
        assert loss == expected_loss and torch.equal(ids, expected_ids)
    assert len({loss for loss, _ in launched}) == len(launched)
    assert not torch.equal(launched[3][1], launched[4][1])


def test_ids_of_another_shape_are_refused(ranks: Any) -> None:
    ranks(1, refused)


def refused() -> None:
    run = assemble(of_runs(ParallelConfig()), torch.device("cpu")).step
    batch = one_loss.batch_of(0, SEQUENCES)
    with pytest.raises(ValueError, match=r"model.num_layers and model.moe.top_k, \[1, 8, 8, 4, 2\] here, and got"):
        run.step(batch._replace(topk_ids_MBNLK=given_ids()[None, :, :, 1:]))
