"""Whole runs on several ranks, by the command line, train as one process does. test_launch.py starts the ranks."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.toml")


@pytest.mark.parametrize("kind", ["ulysses", "allgather"])
def test_context_parallel_ranks_train_the_quickstart_as_one_process(ranks, make_run, kind: str) -> None:
    few = (
        "--train.steps=2 --train.micro_batch_sequences=2 --validation.every_steps=2 --validation.num_sequences=4 "
        "--metrics.every_steps=1 --metrics.sample_tokens=3 --data.document_attention=true "
        "--checkpoint.save_last_step=false"
    ).split()
    one, split = make_run(*few), make_run(*few, "--parallel.cp=2", f"--parallel.cp_kind={kind}")
    for run in (one, split):
        run.words[1] = QUICKSTART
    assert one.train(f"--data.cache_folder={one.folder / 'cache'}") == 0
    split.on(ranks, 2, f"--data.cache_folder={one.folder / 'cache'}")
    for name in ("loss", "aux_loss", "grad_norm", "validation_loss"):
        assert split.column(name) == pytest.approx(one.column(name), rel=1e-4), name
    assert split.column("tokens_seen") == one.column("tokens_seen") == [2048, 4096]


def test_ranks_of_two_nodes_train_as_one_process(ranks, tiny) -> None:
    words = ("--train.steps=4", "--train.micro_batch_sequences=1")
    alone, spread = tiny(*words), tiny(*words)
    assert alone.train() == 0
    nodes = ("--parallel.ep=4", "--parallel.dispatcher=hierarchical", "--parallel.ep_ranks_per_node=2")
    spread.on(ranks, 4, *nodes)
    assert spread.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5) and len(spread.column("loss")) == 4
