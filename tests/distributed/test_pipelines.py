"""Every schedule of a pipeline trains as one process does, beside every other axis.

Gradients after step 1 and losses as in test_one_loss.py, in fp64: documents of uneven length, a dense first layer,
balancing losses, expert bias, shared experts, ranks with other numbers of labels, tied embeddings in about half. All
schedules beside all axes, for 20 steps:

    python -m pytest tests/distributed/test_pipelines.py --all-cases
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import pytest
from support import load

from titan_moe.config import Recipe, check_rules
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, MemoryConfig
from titan_moe.config.train import RunConfig
from titan_moe.dispatch import capacity
from titan_moe.training.step_runner import StepRunner

one_loss = load("distributed/test_one_loss")

STEPS, ALL_STEPS = 2, 20
NUM_SEQUENCES, MICROBATCHES_A_RANK = 16, 2
"""As few as a pipeline in the form of a V fills all its ranks with."""
SCHEDULES = {
    "1f1b": ParallelConfig(pp_schedule="1f1b"),
    "interleaved_1f1b": ParallelConfig(pp_schedule="interleaved_1f1b", vpp=2),
    "zbv": ParallelConfig(pp_schedule="zbv", vpp=2, accumulate_unsharded=True),
    "dualpipev": ParallelConfig(pp_schedule="dualpipev", vpp=2, accumulate_unsharded=True),
}
KEPT, OUTPUTS, OF_GQA, OF_MLA = MemoryConfig(), one_loss.OUTPUTS, one_loss.OF_GQA, one_loss.OF_MLA
OUTPUTS_OF_GQA = MemoryConfig((*OUTPUTS.recompute, "qkv_rope"))
AXES: dict[str, dict[str, Any]] = {
    "ep2": {"ep": 2, "dispatcher": "alltoall"},
    "dp2": {"dp_shard": 2},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
}


def recipe_of(parallel: ParallelConfig, model: str = "gqa", memory: MemoryConfig = KEPT) -> Recipe:
    """A layer for each of up to eight stages, the first of them dense; two microbatches for each rank of the pipeline,
    of up to two data ranks."""
    base = one_loss.split_recipe(parallel, model, run=RunConfig(device="cpu"), memory=memory)
    num_microbatches = MICROBATCHES_A_RANK * max(parallel.pp, 2)
    size = max(NUM_SEQUENCES // num_microbatches // max(parallel.dp_shard, parallel.ep, 1), 1)
    train = replace(
        base.train, steps=ALL_STEPS, global_batch_sequences=NUM_SEQUENCES, micro_batch_sequences=size, seq_len_tokens=8
    )
    num_layers = 4 if parallel.pp * parallel.vpp <= 4 and not parallel.pp_layout else 8
    return replace(base, train=train, model=replace(base.model, num_layers=num_layers))


@pytest.fixture(scope="module")
def alone(ranks: Any) -> Callable[..., Any]:
    """One process, by the name of a model and the numbers of steps and layers."""

    @cache
    def train(model: str, num_steps: int, num_layers: int = 4) -> Any:
        recipe = recipe_of(ParallelConfig(), model)
        recipe = replace(recipe, model=replace(recipe.model, num_layers=num_layers))
        return one_loss.run(ranks, 1, recipe, -1, num_steps)[0]

    return train


def assert_trains_alike(
    ranks: Any, alone: Callable[..., Any], recipe: Recipe, model: str = "gqa", num_steps: int = STEPS
) -> None:
    p = recipe.parallel
    num_ranks = p.pp * p.tp * p.cp * max(p.dp_shard, p.ep, 1)
    assert check_rules(recipe, num_ranks) == []
    for trace in one_loss.run(ranks, num_ranks, recipe, -1, num_steps):
        one_loss.assert_same(trace, alone(model, num_steps, recipe.model.num_layers), 1e-9)


@pytest.mark.few(
    "1f1b-cp2-gqa-tied-memory0",
    "interleaved_1f1b-ep2-gqa-memory1",
    "zbv-tp2-gqa-tied-memory2",
    "dualpipev-ep2-gqa-tied-memory4",
)
@pytest.mark.parametrize(
    ("schedule", "axis", "model", "memory"),
    [
        ("1f1b", "cp2", "gqa-tied", OF_GQA),
        ("interleaved_1f1b", "ep2", "gqa", MemoryConfig(("norms:-2", "experts:-2", "block:2"))),
        ("zbv", "tp2", "gqa-tied", OUTPUTS),
        ("zbv", "dp2", "gqa", KEPT),
        ("dualpipev", "ep2", "gqa-tied", OUTPUTS_OF_GQA),
    ],
)
def test_every_schedule_trains_as_one_process(
    ranks: Any, alone: Callable[..., Any], schedule: str, axis: str, model: str, memory: MemoryConfig
) -> None:
    """Where backwards are split, outputs alone are computed again."""
    parallel = replace(SCHEDULES[schedule], pp=2, **AXES[axis])
    assert_trains_alike(ranks, alone, recipe_of(parallel, model, memory), model)


@pytest.mark.few("interleaved_1f1b", "dualpipev")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_ranks_of_a_pipeline_train_as_one_process(ranks: Any, alone: Callable[..., Any], schedule: str) -> None:
    model = "gqa-tied" if schedule == "interleaved_1f1b" else "gqa"  # first and last stage are on other ranks
    assert_trains_alike(ranks, alone, recipe_of(replace(SCHEDULES[schedule], pp=4), model), model)


@pytest.mark.few("tied", "tied_v", "tied_tp", "embedding_alone", "empty_stage", "recompute_parts", "four_stages_a_rank")
@pytest.mark.parametrize(
    ("model", "memory", "changes"),
    [
        pytest.param("gqa-tied", KEPT, {}, id="tied"),
        pytest.param("gqa-tied", KEPT, {"pp_schedule": "zbv", "vpp": 2, "accumulate_unsharded": True}, id="tied_v"),
        pytest.param("gqa-tied", KEPT, {"tp": 2}, id="tied_tp"),
        pytest.param("gqa-window", OUTPUTS, {"pp_layout": "E|ttttttttL"}, id="embedding_alone"),
        pytest.param(
            "gqa",
            KEPT,
            {"pp_schedule": "interleaved_1f1b", "vpp": 2, "pp_layout": "E|t*8||L"},
            id="empty_stage",
        ),
        pytest.param("mla", MemoryConfig("block"), {"dp_shard": 2, "accumulate_unsharded": True}, id="recompute_block"),
        pytest.param("mla-latent-gate", OF_MLA, {"dp_shard": 2}, id="recompute_parts"),
        pytest.param("gqa", KEPT, {"pp_schedule": "interleaved_1f1b", "vpp": 4}, id="four_stages_a_rank"),
    ],
)
def test_models_train_on_two_stages_as_in_one_process(
    ranks: Any, alone: Callable[..., Any], model: str, memory: MemoryConfig, changes: dict[str, Any]
) -> None:
    assert_trains_alike(ranks, alone, recipe_of(replace(ParallelConfig(pp=2), **changes), model, memory), model)


@pytest.mark.few("pieces")
@pytest.mark.parametrize(
    ("schedule", "ep"), [pytest.param("zbv", 1, id="pieces"), pytest.param("dualpipev", 2, id="pairs")]
)
def test_stages_and_microbatches_share_their_graphs(
    ranks: Any, alone: Callable[..., Any], schedule: str, ep: int
) -> None:
    parallel = replace(SCHEDULES[schedule], pp=2, ep=ep, dispatcher="allgather")
    if schedule == "dualpipev":
        parallel = replace(parallel, overlap="microbatch")
    candidate = replace(recipe_of(parallel, "gqa"), compile=CompileConfig("on"))
    one = replace(candidate, parallel=ParallelConfig(ep=ep, dispatcher="allgather", accumulate_unsharded=True))
    (of_one,) = {tuple(fields["num_graphs"]) for fields in ranks(ep, one_loss.train_compiled, one, -1, 1, "eager")}
    # test_rehearsal.py has pairs whose graphs have a backward
    answers = ranks(2 * ep, one_loss.train_compiled, candidate, -1, STEPS, "eager")
    seen = [one_loss.Trace(**fields) for fields in answers]
    for trace in seen:
        assert trace.losses == pytest.approx(alone("gqa", STEPS).losses, rel=1e-9)
        assert len(set(trace.num_graphs)) == 1, "all were made by the first step"
        assert trace.num_graphs[0] <= of_one[0], "no graph for each stage"


PAIRS = replace(SCHEDULES["dualpipev"], pp=2, ep=2, dispatcher="alltoall", overlap="microbatch")
LOOP = {"pp_schedule": "1f1b", "vpp": 1}
LOOPS = {"pp_schedule": "interleaved_1f1b", "vpp": 2}


@pytest.mark.few(
    "interleaved_sharded_tied",
    "allgather",
)
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param("gqa", LOOP, id="1f1b"),
        pytest.param("gqa-tied", {**LOOP, "pp": 4, "dispatcher": "allgather"}, id="1f1b_four_ranks_tied"),
        pytest.param("mla", {**LOOP, "dp_shard": 2, "tp": 2}, id="1f1b_tp"),
        pytest.param("gqa-tied", {**LOOPS, "dp_shard": 4}, id="interleaved_sharded_tied"),
        pytest.param("gqa", {**LOOPS, "pp": 4}, id="interleaved_four_ranks"),
        pytest.param("gqa-window", {**LOOPS, "vpp": 3, "pp_layout": "E|tt|t*4||tt|L"}, id="interleaved_empty_stage"),
        pytest.param(
            "mla-latent-gate",
            {**LOOPS, "ep": 4, "dispatcher": "hierarchical", "ep_ranks_per_node": 2},
            id="interleaved_hierarchical",
        ),
        pytest.param("gqa", {}, id="alltoall"),
        pytest.param("gqa", {"pp": 4}, id="four_ranks"),
        pytest.param("mla-latent-gate", {"dispatcher": "allgather"}, id="allgather"),
        pytest.param("gqa-tied", {"dp_shard": 4}, id="sharded_tied"),
        pytest.param("gqa", {"pp_layout": "E|t*5|ttt|L"}, id="stages_without_layers"),
        pytest.param("gqa-window", {"tp": 2}, id="tp"),
        pytest.param("mla", {"dp_shard": 2, "cp": 2, "etp": 2}, id="cp_etp"),
        pytest.param("gqa", {"ep": 4, "dispatcher": "hierarchical", "ep_ranks_per_node": 2}, id="hierarchical"),
    ],
)
def test_pairs_of_microbatches_train_as_one_process(
    ranks: Any, alone: Callable[..., Any], model: str, changes: dict[str, Any]
) -> None:
    assert_trains_alike(ranks, alone, recipe_of(replace(PAIRS, **changes), model), model)


@pytest.mark.few("interleaved")
@pytest.mark.parametrize("changes", [LOOP, LOOPS], ids=["1f1b", "interleaved"])
def test_pairs_recompute_experts_and_train_as_one_process(
    ranks: Any, alone: Callable[[str, int], Any], changes: dict[str, Any]
) -> None:
    assert_trains_alike(
        ranks, alone, recipe_of(replace(PAIRS, **changes), memory=MemoryConfig(("attention", "experts")))
    )


def count_reruns(recipe: Recipe) -> tuple[list[float], int]:
    """Losses, and steps that were taken again; slots are bounded to the slot."""
    again = mock.patch.object(StepRunner, "_take_again", autospec=True, side_effect=StepRunner._take_again)
    with mock.patch.object(capacity, "SLOTS_ALIGNMENT", 1), again as taken_again:
        losses = one_loss.train(recipe, -1, 2 * STEPS)["losses"]
    return losses, taken_again.call_count


@pytest.mark.few("interleaved_pairs")
@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(pp=2, ep=2), PAIRS, replace(PAIRS, **LOOPS)],
    ids=["1f1b", "pairs", "interleaved_pairs"],
)
def test_a_step_that_overflows_on_one_stage_is_taken_again_by_all(
    ranks: Any, alone: Callable[..., Any], parallel: ParallelConfig
) -> None:
    parallel = replace(parallel, dispatcher="allgather", expert_rank_capacity_factor=1.4)
    seen = ranks(4, count_reruns, recipe_of(parallel))
    assert {reruns for _, reruns in seen} == {seen[0][1]} and seen[0][1] > 0
    for losses, _ in seen:
        assert losses == pytest.approx(alone("gqa", 2 * STEPS).losses, rel=1e-9)


def matrix() -> list[tuple[str, int, str, str]]:
    """All schedules beside all axes, on 2 and 4 ranks; every second one with tied embeddings."""
    numbered = product(enumerate(SCHEDULES), enumerate((2, 4)), enumerate(AXES))
    models = "gqa", "gqa-tied"
    return [(schedule, pp, axis, models[(i + j + k) % 2]) for (i, schedule), (j, pp), (k, axis) in numbered]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pp" in metafunc.fixturenames:
        is_asked = metafunc.config.getoption("--all-cases")
        metafunc.parametrize(("schedule", "pp", "axis", "model"), matrix() if is_asked else [])


def test_every_schedule_trains_as_one_process_beside_every_axis(
    ranks: Any, alone: Callable[..., Any], schedule: str, pp: int, axis: str, model: str
) -> None:
    parallel = replace(SCHEDULES[schedule], pp=pp, **AXES[axis])
    assert_trains_alike(ranks, alone, recipe_of(parallel, model), model, num_steps=ALL_STEPS)
