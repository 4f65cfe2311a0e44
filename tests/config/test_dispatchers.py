"""Facts of dispatchers: a registered row is accepted, explained and used by rules and plan."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from titan_moe.config import RecipeError, check_rules, dump_recipe, load_recipe
from titan_moe.config.dispatchers import DISPATCHERS, DispatcherFacts, dispatchers_that, facts_of
from titan_moe.config.explain import explain
from titan_moe.plan.check_report import describe
from titan_moe.plan.cost.links import rows_sent

MODEL = (
    "--model.moe.num_experts=8",
    "--model.moe.ffn_hidden_size=64",
    "--parallel.ep=4",
    "--train.global_batch_sequences=32",
)
PIGEON = DispatcherFacts("pigeon", "carries rows by air.", sends="every_row", needs_cuda=True, is_one_node=True)


@pytest.fixture
def empty_file(tmp_path: Path) -> Path:
    file = tmp_path / "empty.toml"
    file.write_text("")
    return file


@pytest.fixture
def pigeon() -> Any:
    with mock.patch.dict(DISPATCHERS, {PIGEON.name: PIGEON}):
        yield PIGEON


def test_registered_dispatcher_is_a_value_of_the_recipe(pigeon: DispatcherFacts, empty_file: Path) -> None:
    recipe = load_recipe(empty_file, ["--parallel.dispatcher=pigeon", *MODEL])
    assert recipe.parallel.facts is pigeon and check_rules(recipe, 4) == []
    assert "dispatcher pigeon" in describe(recipe, 4) and rows_sent(recipe, 4).all == 3
    empty_file.write_text(dump_recipe(recipe))
    assert load_recipe(empty_file) == recipe
    assert '\n    "pigeon"                carries rows by air.' in explain("parallel.dispatcher")


def test_registered_dispatcher_is_read_by_rules(pigeon: DispatcherFacts, empty_file: Path) -> None:
    wrong = ("--run.device=cpu", "--parallel.expert_rank_capacity_factor=2", "--compile.cudagraph=step")
    recipe = load_recipe(empty_file, ["--parallel.dispatcher=pigeon", *MODEL, *wrong])
    problems = "\n".join(check_rules(recipe, 6))
    for expected in (
        'parallel.dispatcher = "pigeon" does not exist with run.device = "cpu"',
        "does not divide the 6 ranks of a node",
        'has no effect with parallel.dispatcher = "pigeon"',
        'parallel.dispatcher = "pigeon" reads the counts of every layer on the host',
    ):
        assert expected in problems, problems


@pytest.mark.parametrize("value", ['"pigeon"', "3", '["local"]', "{ local = 1 }"])
def test_dispatcher_outside_the_table_is_refused(empty_file: Path, value: str) -> None:
    empty_file.write_text(f"[parallel]\ndispatcher = {value}\n")
    with pytest.raises(
        RecipeError,
        match='must be one of "local", "allgather", "alltoall", "symm_mem", "hierarchical", "hierarchical_symm_mem"; '
        "for one of your own, start a script that imports its module",
    ):
        load_recipe(empty_file)


def test_unknown_dispatcher_error_says_how_to_register_it() -> None:
    with pytest.raises(
        ValueError, match='"pigeon" is not in the table; take "local", .* titan_moe.register_dispatcher'
    ):
        facts_of("pigeon")


def test_dispatcher_purposes_are_one_line_each_in_explain() -> None:
    lines = explain("parallel.dispatcher").splitlines()
    for name, facts in DISPATCHERS.items():
        (line,) = [line for line in lines if line.startswith(f'    "{name}"')]
        assert f" {facts.purpose}" in line


def test_dispatcher_lists_in_errors() -> None:
    assert dispatchers_that(lambda facts: facts.shares_memory_of_ep) == '"symm_mem"'
    movers = '"allgather", "alltoall", "symm_mem", "hierarchical" or "hierarchical_symm_mem"'
    assert dispatchers_that(lambda facts: facts.moves_rows) == movers
