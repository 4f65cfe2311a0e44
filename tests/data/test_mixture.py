"""Mixtures: shares at every step, the order of each source, resumes on other ranks, with other weights and sources."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.files_of_rows import write_rows

from titan_moe.checkpoint.data_change import with_unread
from titan_moe.config import Recipe
from titan_moe.config.mixture import MixtureSource
from titan_moe.data.cache import Cache
from titan_moe.data.loader import Loader
from titan_moe.data.mixture import choose, temper, to_shares
from titan_moe.data.packing import Batch
from titan_moe.data.sources import open_source

WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
LETTERS = {"a": 10, "b": 40, "c": 7}
"""Sequences of a source."""


@pytest.mark.parametrize(
    "weights", [[1], [1, 1], [0.7, 0.3, 0], [0.9, *[0.01] * 10], [5, 3, 3, 1, 1, 1, 0.3, 0.01, 1e-9], [1 / 7] * 7]
)
def test_every_prefix_has_the_shares_to_within_one_sample(weights: list[float]) -> None:
    exact, shares, counts = np.array(weights) / sum(weights), to_shares(weights), [0] * len(weights)
    for number in range(1, 500):
        counts[choose(shares, counts)] += 1
        assert np.abs(exact * number - counts).max() < 1


def test_temperature_one_gives_the_sizes_and_a_large_one_equal_weights() -> None:
    assert temper([100, 300], 1) == [pytest.approx(1 / 3), 1]
    assert temper([100, 400], 2) == [0.5, 1]
    assert temper([100, 300], 1e9) == [pytest.approx(1), 1]


@pytest.fixture
def make(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """Each source counts its sequences: the first token is its letter, then the number of the sequence, and so on."""
    for letter, number in LETTERS.items():
        numbers = np.arange(number * 16 + 1) // 16 + 256 * (ord(letter) - ord("a"))
        numbers.astype("<u2").tofile(tmp_path / f"{letter}.bin")

    def make_(weights: dict[str, float], accept: bool = False, **data: object) -> Recipe:
        sources = tuple(MixtureSource(path=f"{tmp_path}/{name}.bin", weight=w) for name, w in weights.items())
        data = {"source": "mixture", "tokenizer": "", "mixture": sources, **data}
        return make_recipe(data=data, checkpoint={"accept_changed_data": accept}, model={"vocab_size": 1024})

    return make_


def _sequences(batch: Batch) -> list[tuple[str, int]]:
    first = batch.tokens_MBN[..., 0].flatten().tolist()
    return [("abc"[token // 256], token % 256) for token in first]


def _read(loader: Loader, num_steps: int) -> list[tuple[str, int]]:
    return [sequence for _ in range(num_steps) for sequence in _sequences(loader.next_step())]


def test_each_sample_comes_once_before_any_comes_twice(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    loader = open_loader(make(WEIGHTS))
    sequences = _read(loader, 20)
    for name, weight in WEIGHTS.items():
        own = [number for letter, number in sequences if letter == name]
        assert abs(len(own) - weight * len(sequences)) < 1
        passes = [own[at : at + LETTERS[name]] for at in range(0, len(own), LETTERS[name])]
        assert all(sorted(one) == list(range(LETTERS[name])) for one in passes[:-1])
        assert passes[0] != passes[-1] or len(passes) == 1, "another order in each epoch"
        assert loader.epochs[name] == len(own) / LETTERS[name]
    assert loader.epoch is None


@pytest.mark.parametrize("dp_size", [2, 4])
def test_order_does_not_depend_on_ranks_and_a_resume_on_others_is_exact(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], dp_size: int
) -> None:
    recipe = make(WEIGHTS)
    alone = open_loader(recipe)
    ranks = [open_loader(recipe, rank, dp_size) for rank in range(dp_size)]
    for _ in range(3):
        together = [sequence for rank in ranks for sequence in _sequences(rank.next_step())]
        assert together == _sequences(alone.next_step())
    state = json.loads(json.dumps(ranks[-1].state_dict()))
    assert state == alone.state_dict()
    resumed = open_loader(recipe)
    resumed.load_state_dict(state)
    assert resumed.epochs == alone.epochs
    assert _read(resumed, 9) == _read(alone, 9)


def test_other_weights_keep_the_place_of_each_source(
    make: Callable[..., Recipe],
    open_loader: Callable[..., Loader],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    before, after = open_loader(make(WEIGHTS)), open_loader(make({"a": 0, "b": 0.25, "c": 0.75}))
    sequences = _read(before, 5)
    with caplog.at_level(logging.WARNING):
        after.load_state_dict(before.state_dict())
    assert "a 0 (was 0.5), b 0.25 (was 0.3), c 0.75 (was 0.2)" in caplog.text
    later = _read(after, 5)
    assert [sum(letter == name for letter, _ in later) for name in "abc"] == [0, 10, 30]
    for name in "bc":
        own = [number for letter, number in sequences + later if letter == name]
        assert sorted(own[: LETTERS[name]]) == sorted(set(own)), "each once before any twice"
    caplog.clear()
    again = open_loader(make({"a": 0, "b": 0.25, "c": 0.75}))
    again.load_state_dict(after.state_dict())
    assert (_read(again, 3), caplog.text) == (_read(after, 3), "")
    assert after.fingerprint().startswith("a: not read; b: 641 tokens")
    assert with_unread(after.fingerprint(), before.fingerprint()) == before.fingerprint(), "weights are no content"
    (tmp_path / "a.bin").unlink()
    gone = open_loader(make({"a": 0, "b": 0.25, "c": 0.75}))
    gone.load_state_dict(after.state_dict())
    back = open_loader(make({"a": 0, "b": 1, "c": 1}))
    back.load_state_dict(gone.state_dict())
    assert (gone.epochs, back.state_dict()["stream"].count('"taken": 20')) == (after.epochs, 1), "it keeps its place"


def test_sources_come_and_go_where_other_data_is_accepted(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], caplog: pytest.LogCaptureFixture
) -> None:
    before = open_loader(make({"a": 1, "b": 1}))
    first = _read(before, 2)
    state = before.state_dict()
    with pytest.raises(ValueError, match=r"the source 'a' was in .* is not in .*; the source 'c' of data.mixture was"):
        open_loader(make({"b": 1, "c": 1})).load_state_dict(state)
    other = open_loader(make({"b": 1, "c": 1}, accept=True))
    other.load_state_dict(state)
    assert "its place is kept" in caplog.text and "it is read from its start" in caplog.text
    _read(other, 1)
    back = open_loader(make({"a": 1, "b": 1}, accept=True))
    back.load_state_dict(other.state_dict())
    assert "it goes on at its place" in caplog.text
    own = [number for letter, number in first + _read(back, 1) if letter == "a"]
    assert len(own) == 12 and len(set(own[: LETTERS["a"]])) == LETTERS["a"], "each once before any twice"


def test_state_of_other_data_is_refused(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    mixed = open_loader(make(WEIGHTS))
    single = open_loader(make(WEIGHTS, accept=True, source="tokens", path=f"{tmp_path}/a.bin", mixture=()))
    with pytest.raises(ValueError, match="was a mixture, this run's is not"):
        single.load_state_dict(mixed.state_dict())
    with pytest.raises(ValueError, match="was not a mixture, this run's is"):
        open_loader(make(WEIGHTS, accept=True)).load_state_dict(single.state_dict())
    state = mixed.state_dict()
    np.arange(100, dtype="<u2").tofile(tmp_path / "b.bin")
    with pytest.raises(ValueError, match=r"an epoch of the source 'b' of data.mixture has 6 sequences \(was 40\)"):
        open_loader(make(WEIGHTS)).load_state_dict(state)


def test_holdout_is_taken_from_each_source_of_any_kind(
    make_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"content": "r" * 40}] * 10)
    for number in range(10):
        (tmp_path / f"t{number}.txt").write_text("t" * 80)
    sources = (
        MixtureSource(path=f"{tmp_path}/rows.jsonl", text_column="content"),
        MixtureSource(path=f"{tmp_path}/*.txt", name="texts"),
    )
    data = {"source": "mixture", "mixture": sources, "mixture_temperature": 1.0, "holdout_fraction": 0.2}
    recipe = make_recipe(data=data, validation={"every_steps": 1, "num_sequences": 8})
    loader = open_loader(recipe)
    letters = [chr(int(row[1])) for batch in loader.validation_batches() for row in batch.tokens_MBN.flatten(0, 1)]
    assert sorted(set(letters)) == ["r", "t"]
    size = open_source(recipe, loader.tokenizer, Cache(tmp_path / "cache", is_builder=True, barrier=lambda: None)).size
    assert (size.num_tokens, size.num_documents, size.held_out_documents) == (10 * 41 + 10 * 81, 20, 4)
    assert [source.name for source in size.sources] == ["rows", "texts"]
    assert [source.share for source in size.sources] == pytest.approx([41 / 122, 81 / 122])


def test_problem_names_the_source(
    make_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    recipe = make_recipe(data={"source": "mixture", "mixture": (MixtureSource(path=f"{tmp_path}/none.txt"),)})
    with pytest.raises(
        ValueError, match="the source 'none' of data.mixture: path = '.*none.txt' is no file or folder here"
    ):
        open_loader(recipe)
    assert dataclasses.replace(recipe.data, source="auto").by_source().keys() == {""}
