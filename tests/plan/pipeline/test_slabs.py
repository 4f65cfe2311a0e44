"""The slabs of an arena: as many as the schedule keeps at a time, counted one by one."""

from dataclasses import replace

import pytest

from titan_moe.config import Recipe
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import MemoryConfig
from titan_moe.config.pipeline_schedules import SCHEDULES
from titan_moe.config.train import TrainConfig
from titan_moe.plan.pipeline.schedules import actions_of
from titan_moe.plan.pipeline.simulation import max_before_backward, max_delayed, max_held, max_messages
from titan_moe.plan.pipeline.slabs import arena_slabs, few_microbatches
from titan_moe.plan.pipeline.stages import stages_of, stages_of_rank
from titan_moe.plan.resolved import Resolved

MODEL = ModelConfig(num_layers=9, num_dense_layers=2, moe=MoEConfig(num_experts=8))
TRAIN = TrainConfig(global_batch_sequences=128, micro_batch_sequences=2)  # 32 microbatches
LAYOUTS = {"1f1b": 1, "interleaved_1f1b": 2, "zbv": 2, "dualpipev": 2}


def recipe(schedule: str, layout: str = "") -> Recipe:
    parallel = ParallelConfig(pp=4, vpp=LAYOUTS[schedule], pp_schedule=schedule, pp_layout=layout)
    return Recipe(model=MODEL, parallel=parallel, train=TRAIN)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("schedule", LAYOUTS)
def test_slabs_are_the_most_in_flight(schedule: str, rank: int) -> None:
    run = recipe(schedule)
    stages, moe = stages_of(run), {f"layers.{layer}" for layer in range(2, 9)}
    layers = {stage: len(moe.intersection(stages[stage])) for stage in stages_of_rank(rank, run.parallel)}
    in_flight, most, delayed, most_delayed = set(), 0, set(), 0
    for kind, stage, microbatch in actions_of(schedule, 4, LAYOUTS[schedule], 32)[rank]:
        if kind == "forward" and layers[stage]:
            in_flight.add((stage, microbatch))
        if kind in ("backward", "backward_weight"):
            in_flight.discard((stage, microbatch))
            delayed.discard((stage, microbatch))
        if kind == "backward_input" and layers[stage]:
            delayed.add((stage, microbatch))
        most, most_delayed = max(most, len(in_flight)), max(most_delayed, len(delayed))
    assert Resolved(run, 8).parts[rank].slabs == (
        max(most, 1),
        max(layers.values()),
        most_delayed,
        max(layers.values()),
    )
    assert (most_delayed > 0) == (SCHEDULES[schedule].splits_backward and most > 0)


def test_slabs_of_1f1b() -> None:
    assert [part.slabs for part in Resolved(recipe("1f1b", "Ett|ttt|tt|ttL"), 8).parts] == [
        (1, 0, 0, 0),
        (3, 3, 0, 3),
        (2, 2, 0, 2),
        (1, 2, 0, 2),
    ]


def test_slabs_have_no_room_for_hidden_states_that_are_computed_again() -> None:
    run = replace(recipe("1f1b", "Ett|ttt|tt|ttL"), memory=MemoryConfig(("moe_act:3-4", "moe_act:-1")))
    assert [part.slabs.num_hidden_layers for part in Resolved(run, 8).parts] == [0, 1, 2, 1]


def test_without_a_pipeline_there_is_one_place() -> None:
    assert arena_slabs(replace(recipe("1f1b"), parallel=ParallelConfig()), 0, 8, {0: 7}, {0: 5}) == (1, 7, 0, 5)


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("schedule", LAYOUTS)
def test_few_microbatches_are_as_many_in_flight(schedule: str, pp: int) -> None:
    vpp = LAYOUTS[schedule]
    stages = dict.fromkeys(range(pp * vpp), 1.0)
    for number in range(5 * pp, 6 * pp, pp if schedule == "interleaved_1f1b" else 1):
        parallel = ParallelConfig(pp=pp, vpp=vpp, pp_schedule=schedule)  # type: ignore[arg-type]
        train = TrainConfig(global_batch_sequences=number, micro_batch_sequences=1)
        few = few_microbatches(Recipe(model=MODEL, parallel=parallel, train=train), pp)
        assert few < number
        for measure in (max_held, max_before_backward, max_delayed, max_messages):
            of_few, of_all = (
                [measure(of_rank, stages) for of_rank in actions_of(schedule, pp, vpp, it)] for it in (few, number)
            )
            assert of_few == of_all
