"""Entries of `memory.recompute`: names with layers, in the shortest words."""

import pytest

from titan_moe.config import Recipe
from titan_moe.config.model import ModelConfig
from titan_moe.config.mtp import MTPConfig
from titan_moe.config.offload import offload_of
from titan_moe.config.perf import MemoryConfig
from titan_moe.config.recompute import RECOMPUTABLE, entries_of, of_entries, parse_entry, recompute_of


@pytest.mark.parametrize(
    ("entry", "name", "layers"),
    [
        ("norms", "norms", range(6)),
        ("norms:6", "norms", range(6)),
        ("experts:2", "experts", range(2)),
        ("experts:-2", "experts", range(4, 6)),
        ("mla_up:1-3", "mla_up", range(1, 4)),
        ("block:5-5", "block", [5]),
    ],
)
def test_an_entry_is_a_name_and_layers(entry: str, name: str, layers: range) -> None:
    assert parse_entry(entry, 6) == (name, frozenset(layers))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("core_attn", '"attention" is'),
        ("full", '"block" is'),
        ("norm", "parts are norms, qkv_rope"),
        ("norms:", 'written "norms:8"'),
        ("norms:1-2-3", 'written "norms:8"'),
        ("norms:-1-3", 'written "norms:8"'),
        ("norms:7", "the model has 6 layers, not 7"),
        ("norms:-7", "the model has 6 layers, not 7"),
        ("norms:0", "the model has 6 layers, not 0"),
        ("norms:3-6", "layers 3-6 are not in 0-5"),
        ("norms:3-2", "layers 3-2 are not in 0-5"),
        ("Norms", "is no part of a block"),
        ("", '"" is no part of a block'),
    ],
)
def test_what_is_no_entry_says_why(entry: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        parse_entry(entry, 6)


@pytest.mark.parametrize(
    ("entries", "shortest"),
    [
        (("norms:3", "norms:-3"), ("norms",)),
        (("norms:2", "norms:1-4"), ("norms:0-4",)),
        (("experts:-1", "norms:1", "norms:3-3"), ("norms:0-0", "norms:3-3", "experts:5-5")),
        (("auto",), ()),
        (("none",), ()),
        ((), ()),
    ],
)
def test_entries_are_written_as_shortly_as_they_can_be(entries: tuple[str, ...], shortest: tuple[str, ...]) -> None:
    again = of_entries(entries, 6)
    assert entries_of(again.layers, 6) == shortest
    assert of_entries(shortest, 6) == again


def test_names_of_a_layer_are_in_the_order_of_the_table() -> None:
    again = of_entries(("block:-1", "moe_act:2", "norms", "experts:1-2"), 4)
    assert [again.names_of(layer) for layer in range(4)] == [
        ["norms", "moe_act"],
        ["norms", "moe_act", "experts"],
        ["norms", "experts"],
        ["norms", "block"],
    ]
    assert again.without_rows == {1, 2, 3} and again.without_hidden == {0, 1, 2, 3}


def test_one_entry_may_be_a_word() -> None:
    assert MemoryConfig("block") == MemoryConfig(("block",))


def test_names_of_others_are_of_one_part_each() -> None:
    others = [name for part in RECOMPUTABLE.values() for name in part.other_names]
    assert len(set(others)) == len(others) and not set(others) & RECOMPUTABLE.keys()


def test_blocks_of_multi_token_prediction_are_among_the_last() -> None:
    model, memory = ModelConfig(num_layers=4, mtp=MTPConfig(2)), MemoryConfig(("norms:-3",), ("block:-3",))
    run = Recipe(model=model, memory=memory)
    assert recompute_of(run).layers == {"norms": {3, 4, 5}} and offload_of(run).layers == {"block": {3, 4, 5}}
