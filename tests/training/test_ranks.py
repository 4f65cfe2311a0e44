"""Whole runs on several ranks, by the command line, train as one process does. test_launch.py starts the ranks."""

import math
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.toml")


@pytest.mark.few("allgather")
@pytest.mark.parametrize("kind", ["ulysses", "allgather"])
def test_context_parallel_ranks_train_the_quickstart_as_one_process(ranks, make_run, kind: str) -> None:
    few = (
        "--train.steps=2 --train.micro_batch_sequences=1 --train.global_batch_sequences=2 --model.num_layers=2 "
        "--validation.every_steps=2 --validation.num_sequences=2 --validation.sets.all=python-stdlib "
        "--metrics.every_steps=1 --metrics.sample_tokens=3 --data.document_attention=true "
        "--checkpoint.save_last_step=false"
    ).split()
    one, split = make_run(*few), make_run(*few, "--parallel.cp=2", f"--parallel.cp_kind={kind}")
    for run in (one, split):
        run.words[1] = QUICKSTART
    assert one.train(f"--data.cache_folder={one.folder / 'cache'}") == 0
    split.on(ranks, 2, f"--data.cache_folder={one.folder / 'cache'}")
    for name in ("loss", "aux_loss", "grad_norm", "validation_loss", "validation_loss/all"):
        assert split.column(name) == pytest.approx(one.column(name), rel=1e-4), name
    assert split.column("tokens_seen") == one.column("tokens_seen") == [512, 1024]


def test_ranks_of_two_nodes_train_as_one_process(ranks, tiny) -> None:
    words = ("--train.steps=4", "--train.micro_batch_sequences=1")
    alone, spread = tiny(*words), tiny(*words)
    assert alone.train() == 0
    nodes = ("--parallel.ep=4", "--parallel.dispatcher=hierarchical", "--parallel.ep_ranks_per_node=2")
    said = spread.on(ranks, 4, *nodes)
    assert said.count('EXPERIMENTAL: parallel.dispatcher = "hierarchical"') == 1
    assert spread.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5) and len(spread.column("loss")) == 4


@pytest.mark.few("alltoall-one_rank-collapsed1", "allgather-one_rank_in_one_layer-collapsed2")
@pytest.mark.parametrize(
    ("load", "collapsed"), [("collapsed", [1, 2, 3]), ("one_rank", [1, 2, 3]), ("one_rank_in_one_layer", [1])]
)
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_ranks_train_on_after_a_collapse_and_name_the_layers(
    ranks, tiny, dispatcher: str, load: str, collapsed: list[int]
) -> None:
    """Two ranks with two experts each, which are a token's choices."""
    run = tiny("--train.steps=8", f"--train.forced_load={load}", "--model.num_layers=4")
    words = ["--parallel.ep=2", f"--parallel.dispatcher={dispatcher}"]
    if dispatcher == "allgather":
        words += ["--train.seq_len_tokens=128", "--parallel.expert_rank_capacity_factor=1.25"]
    said = run.on(ranks, 2, *words)
    losses, norms = run.column("loss"), run.column("grad_norm")
    assert len(losses) == 8 and all(map(math.isfinite, [*losses, *norms])) and losses[-1] < losses[0]
    assert run.column("skipped_steps") == [0] * 8
    assert run.column("rerun_steps")[-1] == (0 if dispatcher == "alltoall" else 8), "rows exceed a bound"
    names = [f"layers.{layer}.feed_forward.router" for layer in range(1, 4)]
    assert [layer for layer, name in enumerate(names, 1) if f"{name} has collapsed" in said] == collapsed
    for loads in run.column("expert_load"):
        assert [layer for layer, name in enumerate(names, 1) if loads[name] == 2] == collapsed
    assert all(overload["max"] == 2 for overload in run.column("overload"))


def test_ranks_go_on_with_another_load_and_the_step_of_the_run(ranks, tiny) -> None:
    """Steps 8 and 16 are bursts, whichever process takes them."""
    words = ("--parallel.ep=2", "--parallel.dispatcher=alltoall", "--checkpoint.every_steps=5")
    run = tiny("--train.steps=10", "--train.forced_load=bursts")
    run.on(ranks, 2, *words)
    run.on(ranks, 2, *words, "--train.steps=18")
    overloads = [overload["max"] for overload in run.column("overload")]
    assert [step for step, overload in enumerate(overloads, 1) if overload == 2] == [8, 16]
    said = run.on(ranks, 2, *words, "--train.steps=20", "--train.forced_load=none")
    assert 'train.forced_load = "none" (was "bursts")' in said and len(run.column("forced_load")) == 18
