"""What each pipeline rank has, against a built model and against lists written out."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from titan_moe.config import Recipe, check_rules
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.mtp import MTPConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.train import RunConfig, TrainConfig
from titan_moe.models.part import part_of
from titan_moe.models.transformer import Transformer
from titan_moe.plan.cost.count import training_flops_per_token
from titan_moe.plan.cost.memory import state_bytes
from titan_moe.plan.cost.peak import activation_bytes_per_rank, peak_bytes
from titan_moe.plan.cost.roofline import step_work
from titan_moe.plan.pipeline.parts import parts_of, training_flops_of_rank
from titan_moe.plan.pipeline.schedules import actions_of
from titan_moe.plan.pipeline.stages import stages_of, stages_of_rank
from titan_moe.plan.resolved import Resolved

MODEL = ModelConfig(num_layers=7, num_dense_layers=2, ffn_hidden_size=96, moe=MoEConfig(8, ffn_hidden_size=64))
LAYOUTS = {
    "1f1b": ParallelConfig(pp=4),
    "interleaved": ParallelConfig(pp=2, vpp=3, pp_schedule="interleaved_1f1b"),
    "zbv": ParallelConfig(pp=2, vpp=2, pp_schedule="zbv", accumulate_unsharded=True),
    "uneven": ParallelConfig(pp=3, pp_layout="E|t*6|tL"),
}


def recipe_with(parallel: ParallelConfig, num_microbatches: int = 8) -> Recipe:
    train = TrainConfig(global_batch_sequences=num_microbatches, micro_batch_sequences=1, seq_len_tokens=64)
    return Recipe(model=MODEL, parallel=parallel, train=train)


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return recipe_with(request.param)


@pytest.mark.parametrize("num_depths", [0, 2])
@pytest.mark.parametrize("dense", [(0, 1), (1, 4, 5)], ids=["leading", "anywhere"])
def test_parts_have_the_parameters_of_built_stages(recipe: Recipe, dense: tuple[int, ...], num_depths: int) -> None:
    if num_depths and recipe.parallel.pp_layout:
        recipe = replace(recipe, parallel=replace(recipe.parallel, pp_layout=recipe.parallel.pp_layout[:-1] + "mmL"))
    model = replace(MODEL, num_dense_layers=0, dense_layers=dense, mtp=MTPConfig(num_depths))
    recipe = replace(recipe, model=model)
    pp = recipe.parallel.pp
    assert check_rules(recipe, pp) == []
    with torch.device("meta"):
        model = Transformer(recipe.model)
    stages = stages_of(recipe)
    by_rank = []
    for rank, part in enumerate(parts_of(recipe, pp)):
        kept = [name for stage in stages_of_rank(rank, recipe.parallel) for name in stages[stage]]
        built = dict(part_of(model, kept).named_parameters())
        assert part.count.total == sum(parameter.numel() for parameter in built.values())
        assert part.recipe.model.num_moe_layers == sum(".router." in name for name in built)
        experts = [parameter.numel() for name, parameter in built.items() if ".experts." in name]
        assert part.count["experts"] == sum(experts)
        by_rank.append(16 * part.count.total)  # fp32: parameter, gradient and two moments
    assert Resolved(recipe, pp).state_bytes == max(by_rank)


def test_parts_share_a_tied_weight() -> None:
    tied = replace(recipe_with(ParallelConfig(pp=2)), model=replace(MODEL, embeddings_are_tied=True))
    first, last = parts_of(tied, 2)
    words = MODEL.vocab_size * MODEL.hidden_size
    assert (first.count["embedding"], first.count["head"], last.count["embedding"], last.count["head"]) == (
        words,
        0,
        0,
        words,
    )
    in_v = replace(tied, parallel=replace(tied.parallel, vpp=2, pp_schedule="zbv"))
    count = parts_of(in_v, 2)[0].count
    assert (count["embedding"], count["head"]) == (words, 0), "embedding and head are on one rank"


def test_parts_of_a_run_without_a_pipeline_are_the_run() -> None:
    (part,) = parts_of(recipe_with(ParallelConfig()), 8)
    assert part.recipe == recipe_with(ParallelConfig()) and part.num_in_flight == 1 and part.has_head


@pytest.mark.parametrize("num_microbatches", [4, 8, 24, 200])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_microbatches_in_flight_are_those_of_the_list(name: str, num_microbatches: int) -> None:
    recipe = recipe_with(LAYOUTS[name], num_microbatches)
    p, stages, parts = recipe.parallel, stages_of(recipe), parts_of(recipe, recipe.parallel.pp)
    for rank, actions in enumerate(actions_of(p.pp_schedule, p.pp, p.vpp, num_microbatches)):
        held = most = before = most_before = 0
        for action in actions:
            size = sum(module.startswith("layers.") for module in stages[action.stage])
            held += size * {"forward": 1, "backward": -1, "backward_weight": -1}.get(action.kind, 0)
            before += size * {"forward": 1, "backward": -1, "backward_input": -1}.get(action.kind, 0)
            most, most_before = max(most, held), max(most_before, before)
        layers = sum(name.startswith("layers.") for stage in stages_of_rank(rank, p) for name in stages[stage])
        assert parts[rank].num_in_flight == pytest.approx(most / layers)
        assert parts[rank].num_before_backward == pytest.approx(most_before / layers)


def test_a_rank_without_layers_keeps_nothing_for_them() -> None:
    recipe = recipe_with(LAYOUTS["uneven"])
    first, middle, last = parts_of(recipe, 3)
    assert [part.recipe.model.num_layers for part in (first, middle, last)] == [0, 6, 1]
    assert [part.recipe.model.num_moe_layers for part in (first, middle, last)] == [0, 4, 1]
    assert first.num_in_flight == 0 and middle.num_in_flight == 2
    first = replace(first, recipe=replace(first.recipe, model=replace(first.recipe.model, vocab_size=8)))
    words = 8 * MODEL.hidden_size
    assert state_bytes(first) == 16 * words
    assert peak_bytes(first, 1.0) == (16 + 4 + 2) * words, "reduced gradients and the gathered weight, no temporaries"


def test_peak_has_the_activations_of_all_microbatches_in_flight() -> None:
    recipe = recipe_with(LAYOUTS["1f1b"])
    parts = parts_of(recipe, 4)
    assert [part.num_in_flight for part in parts] == [4, 3, 2, 1]
    kept = activation_bytes_per_rank(parts[0].recipe)
    once = replace(parts[0], num_in_flight=1, num_before_backward=1)
    assert peak_bytes(parts[0], 1.0) - peak_bytes(once, 1.0) == pytest.approx(3 * kept) and kept > 0
    assert Resolved(recipe, 4).peak_bytes(1.0) == max(peak_bytes(part, 1.0) for part in parts)


def test_peak_of_the_last_rank_has_the_head_and_its_logits() -> None:
    recipe = recipe_with(LAYOUTS["1f1b"])
    # so that the loss needs more than a layer, and products of chunks less than their softmax
    last = parts_of(replace(recipe, model=replace(MODEL, vocab_size=100_000, hidden_size=32)), 4)[-1]
    last = replace(last, recipe=replace(last.recipe, run=RunConfig(device="cuda")))
    weights, logits, inputs = 32 * 100_000, 64 * 100_000, 64 * 32
    with mock.patch("titan_moe.plan.cost.peak._temporary_bytes", lambda *_, **__: 0):
        more = peak_bytes(last, 1.0) - peak_bytes(replace(last, has_head=False), 1.0)
    of_loss = 2 * inputs + 2 * logits + 4 * weights
    assert more == 16 * (weights + 32) + 2 * weights + of_loss, "state, gathered in bf16, what the loss computes with"


def test_gathered_bytes_are_those_of_one_rank() -> None:
    zbv = recipe_with(LAYOUTS["zbv"])
    dense = max(part.count.total for part in parts_of(zbv, 2))
    assert Resolved(zbv, 2).gathered_bytes <= 6 * dense
    alone = replace(zbv, parallel=ParallelConfig(accumulate_unsharded=True))
    assert Resolved(zbv, 2).gathered_bytes < 0.7 * Resolved(alone, 1).gathered_bytes


def test_work_and_flops_of_all_ranks_are_those_of_the_model(recipe: Recipe) -> None:
    pp, t = recipe.parallel.pp, recipe.train
    total = training_flops_per_token(MODEL, t.seq_len_tokens)
    assert sum(training_flops_of_rank(recipe, rank) for rank in range(pp)) == pytest.approx(total)
    work = [step_work(recipe, pp, rank) for rank in range(pp)]
    flops = sum(part.flops for of_rank in work for name, part in of_rank.items() if name != "router")
    assert flops == pytest.approx(total * t.global_batch_sequences * t.seq_len_tokens)
    assert sum("head" in of_rank for of_rank in work) == 1
