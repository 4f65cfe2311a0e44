"""Pipelines: checkpoints and initial weights do not depend on the stages; validation and text pass all of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import load
from torch import Tensor

from titan_moe.config import Recipe
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import CheckpointConfig
from titan_moe.optim.fused_adamw import FusedAdamW
from titan_moe.training.build import assemble

pipelines, states = load("distributed/test_pipelines"), load("distributed/test_tensor_parallel")

PP2 = ParallelConfig(pp=2)
PP4 = ParallelConfig(pp=4)
LAYOUTS = {
    "pp4": (4, PP4),
    "one": (1, ParallelConfig()),
    "pp2-vpp2": (2, replace(PP2, vpp=2, pp_schedule="interleaved_1f1b")),
    "pp2-v-ep2": (4, replace(pipelines.SCHEDULES["zbv"], pp=2, ep=2, dispatcher="alltoall")),
    "pp2-tp2": (4, replace(PP2, tp=2)),
    "empty": (2, replace(PP2, vpp=2, pp_schedule="interleaved_1f1b", pp_layout="Et|t*7||L")),
    "ep2-dp2": (4, ParallelConfig(ep=2, dispatcher="alltoall")),
}


def merged(by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state of all stages; ranks that have the same tensor have the same values."""
    whole: dict[str, Tensor] = {}
    for state in by_rank:
        assert all(torch.equal(whole[name], state[name]) for name in whole.keys() & state)
        whole |= state
    return whole


@pytest.mark.few("pp2-tp2-empty-gqa-tied", "pp4-pp2-vpp2-gqa-tied")
@pytest.mark.parametrize(
    ("before", "after", "model"),
    [
        ("pp4", "one", "gqa"),
        ("one", "pp4", "gqa-tied"),
        ("pp4", "pp2-vpp2", "gqa-tied"),
        ("pp2-vpp2", "pp2-v-ep2", "gqa-tied"),
        ("pp2-v-ep2", "pp2-tp2", "mla"),
        ("pp2-tp2", "empty", "gqa-tied"),
        ("empty", "ep2-dp2", "gqa-tied"),
    ],
)
def test_pipeline_checkpoints_load_bit_for_bit_on_other_layouts(
    ranks: Any, tmp_path: Path, before: str, after: str, model: str
) -> None:
    config = CheckpointConfig(is_async=before == "pp4")
    layouts = LAYOUTS[before], LAYOUTS[after]
    recipes = [replace(pipelines.recipe_of(parallel, model), checkpoint=config) for _, parallel in layouts]
    num_layers = max(recipe.model.num_layers for recipe in recipes)
    first, later = (
        (num_ranks, replace(recipe, model=replace(recipe.model, num_layers=num_layers)))
        for (num_ranks, _), recipe in zip(layouts, recipes, strict=True)
    )
    saved = merged(ranks(first[0], states.save, first[1], tmp_path))
    loaded = merged(ranks(later[0], states.resume, later[1], tmp_path))
    assert saved.keys() == loaded.keys() and len(saved) > 150
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name


def learn(recipe: Recipe, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of four steps and the state after them, in folders with the checkpoint of two steps from there."""
    run = states.Run(recipe, folder)
    if not run.checkpointer.load():
        run.train_and_save(1, 2)
    losses = [run.built.step(run.loader.next_step()).loss.item() for _ in range(4)]
    run.checkpointer.close()
    return losses, run.state()


@pytest.mark.few("dualpipev-gqa-tied")
@pytest.mark.parametrize("model", ["gqa-tied", "gqa"])
@pytest.mark.parametrize("schedule", pipelines.SCHEDULES)
def test_a_resumed_pipeline_trains_on_as_the_uninterrupted_one(
    ranks: Any, tmp_path: Path, schedule: str, model: str
) -> None:
    recipe = replace(
        pipelines.recipe_of(replace(pipelines.SCHEDULES[schedule], pp=2), model),
        checkpoint=CheckpointConfig(is_async=False),
    )
    whole, resumed = ranks(2, learn, recipe, tmp_path), ranks(2, learn, recipe, tmp_path)
    for (losses, state), (losses_after, state_after) in zip(whole, resumed, strict=True):
        assert losses_after == losses and len(set(losses)) == 4
        assert state.keys() == state_after.keys() and all(torch.equal(state[name], state_after[name]) for name in state)


WITH_CP = {"pp2-cp2": (4, replace(PP2, cp=2)), "pp2-cp2-allgather": (4, replace(PP2, cp=2, cp_kind="allgather"))}


@pytest.mark.few("pp4", "pp2-vpp2", "pp2-tp2", "pp2-cp2")
@pytest.mark.parametrize("layout", ["pp4", "pp2-vpp2", "pp2-tp2", "pp2-cp2", "pp2-cp2-allgather"])
def test_stages_keep_parts_of_the_same_initial_weights_validate_and_generate_the_same(ranks: Any, layout: str) -> None:
    num_ranks, parallel = (LAYOUTS | WITH_CP)[layout]
    model = "gqa-tied" if layout == "pp4" else "gqa"
    whole, _, loss, tokens = ranks(1, states.describe, pipelines.recipe_of(ParallelConfig(), model))[0]
    seen = ranks(num_ranks, states.describe, pipelines.recipe_of(parallel, model))
    stages = merged([state for state, *_ in seen])
    assert stages.keys() == whole.keys() and all(torch.equal(stages[name], value) for name, value in whole.items())
    for _, _, stages_loss, stages_tokens in seen:
        assert stages_loss == pytest.approx(loss, rel=1e-12)
        assert torch.equal(stages_tokens, tokens)


def learn_with_bf16_moments(recipe: Recipe) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """The state after three steps, and the seeds of stochastic rounding by name."""
    built = assemble(recipe, states.CPU)
    options = {"parallel": recipe.parallel, "num_sequences": recipe.train.global_batch_sequences}
    for step in range(3):
        built.step(states.one_loss.batch_of(step, recipe.train.micro_batch_sequences, built.meshes, **options))
    seeds: dict[str, list[int]] = {}
    for part, optimizer in zip(built.parts, built.optimizers, strict=True):
        assert isinstance(optimizer, FusedAdamW)
        for name, parameter in part.named_parameters():
            seeds.setdefault(name, []).append(optimizer.seeds[parameter])
    return states.state_of(built), seeds


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_stages_round_differently_and_copies_of_a_tied_weight_alike(ranks: Any, schedule: str) -> None:
    parallel = replace(pipelines.SCHEDULES[schedule], pp=2)
    recipe = pipelines.recipe_of(parallel, "gqa-tied")
    optim, precision = (
        replace(recipe.optim, kind="fused_adamw"),
        PrecisionConfig("fp32", "fp32", "fp32", moments="bf16"),
    )
    seen = ranks(2, learn_with_bf16_moments, replace(recipe, optim=optim, precision=precision))
    state = merged([state for state, _ in seen])
    assert state["state.embed.weight.exp_avg"].dtype == torch.bfloat16
    seeds = [(name, seed) for _, by_name in seen for name, own in by_name.items() for seed in own]
    assert len([name for name, _ in seeds if name == "embed.weight"]) == 2
    assert len(set(seeds)) == len({seed for _, seed in seeds}) == len(seeds) - 1, "one for each name"
