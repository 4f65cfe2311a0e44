"""Mixtures of streams: shares at every step, one order on any number of ranks, exact resumes, and few lanes a rank."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.files_of_rows import write_rows

from titan_moe.config import Recipe
from titan_moe.config.mixture import MixtureSource
from titan_moe.data.lanes import cut as cut_module
from titan_moe.data.lanes.lane import Lane
from titan_moe.data.loader import Loader

NUM_SEQUENCES = 16


@pytest.fixture
def make(make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """Two streams and a corpus, whose texts consist of letters of their own."""
    monkeypatch.setattr(cut_module, "MIN_PART_BYTES", 1)
    for letter in "abc":
        rows = [{"text": letter * (20 + number * 37 % 60)} for number in range(200)]
        write_rows(tmp_path / f"{letter}.jsonl", rows)

    def make_(
        weights: tuple[float, ...] = (0.6, 0.1, 0.3), lanes: int = 32, accept: bool = False, **data: Any
    ) -> Recipe:
        sources = tuple(
            MixtureSource(path=f"{tmp_path}/{name}.jsonl", weight=weight, is_streamed=name != "c")
            for name, weight in zip("abc", weights, strict=False)
        )
        own = {"source": "mixture", "mixture": sources, "stream_lanes": lanes, "stream_has_worker": False}
        own["shuffle_buffer_sequences"] = 4
        train = {"global_batch_sequences": NUM_SEQUENCES, "micro_batch_sequences": 1}
        return make_recipe(data=own | data, train=train)

    return make_


def _steps(loaders: list[Loader], num_steps: int) -> list[list[list[int]]]:
    ranks = [[loader.next_step().tokens_MBN.flatten(0, 1).tolist() for _ in range(num_steps)] for loader in loaders]
    return [[row for rank in ranks for row in rank[step]] for step in range(num_steps)]


def _saved(loaders: list[Loader]) -> dict[str, Any]:
    states = [loader._position["stream"] for loader in loaders]
    for loader in loaders:
        loader._gather = lambda state: states
    saved = [loader.state_dict() for loader in loaders]
    assert all(state == saved[0] for state in saved)
    return json.loads(json.dumps(saved[0]))


@pytest.mark.parametrize("lanes", [32, 6, 0])
def test_shares_order_and_resumes_do_not_depend_on_ranks(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], lanes: int
) -> None:
    recipe = make(lanes=lanes)
    expected = _steps([open_loader(recipe)], 9)
    counts = Counter[str]()
    for number, step in enumerate(expected, 1):
        counts += Counter(chr(max(row)) for row in step)
        shares = {"a": 0.6, "b": 0.1, "c": 0.3}
        assert all(abs(counts[name] - share * number * NUM_SEQUENCES) < 1 for name, share in shares.items())
    for before, after in ((2, 4), (4, 1), (1, 2)):
        loaders = [open_loader(recipe, rank, before) for rank in range(before)]
        assert _steps(loaders, 4) == expected[:4]
        state, resumed = _saved(loaders), [open_loader(recipe, rank, after) for rank in range(after)]
        for loader in resumed:
            loader.load_state_dict(state)
        assert _saved(resumed) == state
        assert resumed[0].epochs.keys() == {*"abc"}
        assert _steps(resumed, 5) == expected[4:]


def test_worker_reads_the_same_samples(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, beside_recipe = make(), make(stream_has_worker=True)
    monkeypatch.undo()  # the worker does not know it
    open_loader(recipe)  # which fills the cache
    alone, beside = open_loader(recipe, 1, 2), open_loader(beside_recipe, 1, 2)
    for _ in range(3):
        assert _steps([alone], 1) == _steps([beside], 1)
        assert (alone.state_dict(), alone.epochs) == (beside.state_dict(), beside.epochs)
    resumed = open_loader(beside_recipe, 1, 2)
    resumed.load_state_dict(beside.state_dict())
    assert resumed.epochs == beside.epochs
    assert _steps([resumed], 2) == _steps([alone], 2)


def test_rank_reads_few_lanes_also_of_a_small_share(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Counter[int]()
    monkeypatch.setattr(Lane, "has_documents", lambda lane: True)
    init = Lane.__init__

    def counted(lane: Lane, *arguments: Any) -> None:
        opened[rank] += 1
        init(lane, *arguments)

    monkeypatch.setattr(Lane, "__init__", counted)
    for rank in range(4):
        _steps([open_loader(make(), rank, 4)], 30)
    assert max(opened.values()) <= 2 * 32 // 4 + 8, "of two streams"


def test_other_weights_and_sources_that_are_not_read(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    before, without = open_loader(make()), open_loader(make((0, 1, 1)))
    _steps([before], 3)
    without.load_state_dict(before.state_dict())
    (tmp_path / "a.jsonl").rename(tmp_path / "gone")
    alone = open_loader(make((0, 1, 1)))
    alone.load_state_dict(without.state_dict())
    assert _steps([alone], 4) == _steps([without], 4)
    (tmp_path / "gone").rename(tmp_path / "a.jsonl")
    back = open_loader(make((1, 0, 0)))
    back.load_state_dict(alone.state_dict())
    only = open_loader(make((1, 0, 0)))
    only.load_state_dict(before.state_dict())
    assert _steps([back], 3) == _steps([only], 3), "it goes on at its place"
    with pytest.raises(ValueError, match="the checkpoint's data was a stream, this run's is not"):
        sources = make().data.mixture
        plain = tuple(MixtureSource(path=source.path, weight=source.weight) for source in sources)
        open_loader(make(mixture=plain)).load_state_dict(before.state_dict())


def test_problem_names_the_source(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("a")
    sources = (MixtureSource(path=f"{tmp_path}/a.txt", is_streamed=True),)
    with pytest.raises(ValueError, match="the source 'a' of data.mixture: is_streamed = true streams rows, but path"):
        open_loader(make(mixture=sources))
