"""A stream in lanes: one order on any number of ranks, exact resumes, and a rank that reads only its lanes."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.files_of_rows import write_rows

from titan_moe.config import Recipe
from titan_moe.data.lanes import cut as cut_module
from titan_moe.data.lanes.samples import deal
from titan_moe.data.loader import Loader
from titan_moe.data.packing import IGNORE_LABEL
from titan_moe.data.rows import Rows
from titan_moe.data.tokenizer import ByteTokenizer

NUM_ROWS = 600


@pytest.fixture
def stream(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Recipe]:
    """Rows with their number in words, in files of two kinds of ending."""
    monkeypatch.setattr(cut_module, "MIN_PART_BYTES", 1)

    def make(
        ending: str = "jsonl", lanes: int = 32, sequences: int = 16, validation: Any = None, **data: Any
    ) -> Recipe:
        folder = tmp_path / ending
        if not folder.exists():
            folder.mkdir()
            rows = [{"text": f"{number:04d}" + "x" * (number * 37 % 60)} for number in range(NUM_ROWS)]
            for first in range(0, NUM_ROWS, 200):
                write_rows(folder / f"{first}.{ending}", rows[first : first + 200])
        own = {"source": "auto", "path": str(folder), "is_streamed": True, "stream_lanes": lanes}
        own |= {"stream_has_worker": False, "shuffle_buffer_sequences": 4}
        train = {"global_batch_sequences": sequences, "micro_batch_sequences": 1}
        return make_recipe(data=own | data, train=train, validation=validation or {})

    return make


def _steps(loader: Loader, num_steps: int) -> list[list[list[int]]]:
    return [loader.next_step().tokens_MBN.flatten(0, 1).tolist() for _ in range(num_steps)]


def _together(loaders: list[Loader], num_steps: int) -> list[list[list[int]]]:
    ranks = [_steps(loader, num_steps) for loader in loaders]
    return [[row for rank in ranks for row in rank[step]] for step in range(num_steps)]


def _saved(loaders: list[Loader]) -> dict[str, Any]:
    """The state that all ranks save."""
    states = [loader._position["stream"] for loader in loaders]
    for loader in loaders:
        loader._gather = lambda state: states
    saved = [loader.state_dict() for loader in loaders]
    assert all(state == saved[0] for state in saved)
    return json.loads(json.dumps(saved[0]))


@pytest.mark.parametrize(
    ("ending", "lanes", "sequences"),
    [
        ("jsonl", 32, 16),
        ("jsonl", 8, 16),
        ("parquet", 24, 16),
        ("jsonl.gz", 256, 16),
        ("jsonl", 16, 16),
        ("arrow", 2, 8),
        ("jsonl", 24, 16),
        ("jsonl", 6, 16),
    ],
)
def test_order_is_that_of_one_rank_and_resumes_on_others(
    stream: Callable[..., Recipe], open_loader: Callable[..., Loader], ending: str, lanes: int, sequences: int
) -> None:
    recipe = stream(ending, lanes, sequences)
    expected = _steps(open_loader(recipe), 12)
    for before, after in ((2, 4), (4, 1), (1, 2)):
        loaders = [open_loader(recipe, rank, before) for rank in range(before)]
        assert _together(loaders, 5) == expected[:5]
        resumed = [open_loader(recipe, rank, after) for rank in range(after)]
        state = _saved(loaders)
        for loader in resumed:
            loader.load_state_dict(state)
        assert _saved(resumed) == state, "also before a step"
        assert _together(resumed, 7) == expected[5:]
    assert open_loader(recipe).epoch == 0.0


@pytest.mark.parametrize(("num_lanes", "batch"), [(24, 16), (6, 16), (7, 3), (32, 8), (5, 5), (1, 4)])
def test_each_lane_gives_as_many_as_any_other_and_stays_at_its_sequences(num_lanes: int, batch: int) -> None:
    counts, lanes = np.zeros(num_lanes, dtype=np.int64), [set[int]() for _ in range(batch)]
    for step in range(2 * num_lanes):
        dealt = deal(counts, batch if step else 2)  # a batch of another size before
        np.add.at(counts, dealt, 1)
        assert counts.max() - counts.min() <= 1
        for own, lane in zip(lanes, dealt.tolist() if step else [], strict=False):
            own.add(lane)
    assert max(max(own) - min(own) for own in lanes) <= -(-num_lanes // batch) + 1


def test_lane_without_text_is_skipped_and_counted(
    stream: Callable[..., Recipe],
    open_loader: Callable[..., Loader],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recipe = stream(lanes=4, sequences=4)
    rows = [json.dumps({"text": ""})] * 3000
    (tmp_path / "jsonl" / "900.jsonl").write_text("\n".join(rows))
    expected, ranks = open_loader(recipe), [open_loader(recipe, rank, 2) for rank in range(2)]
    for _ in range(3):
        labels = expected.next_step().labels_MBN
        assert labels.tolist() == [row for rank in ranks for row in rank.next_step().labels_MBN.tolist()]
        is_bad = (labels == IGNORE_LABEL).flatten(0, 1).all(1)
        assert is_bad.tolist() == [False, False, True, True]
    assert "lane 3 reads: it has nothing to learn from" in caplog.text
    assert [len(loader.bad_rows) for loader in (expected, *ranks)] == [2, 0, 2]
    state = _saved(ranks)
    resumed = open_loader(recipe)
    resumed.load_state_dict(state)
    assert _steps(resumed, 2) == _steps(expected, 2)
    for file in (tmp_path / "jsonl").iterdir():
        file.write_text("\n".join(rows))
    with pytest.raises(ValueError, match="data.path has nothing to learn from"):
        open_loader(recipe, 1, 2).next_step()


def test_resumed_stream_knows_its_epoch_before_a_batch(
    stream: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    before = open_loader(stream(lanes=8, sequences=8))
    _steps(before, 400)
    assert (before.epoch or 0) > 1
    for has_worker in (False, True):
        after = open_loader(stream(lanes=8, sequences=8, stream_has_worker=has_worker))
        after.load_state_dict(before.state_dict())
        assert after.epoch == before.epoch


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_every_row_is_read_once_before_a_lane_begins_again(
    stream: Callable[..., Recipe], open_loader: Callable[..., Loader], is_shuffled: bool
) -> None:
    validation = {"every_steps": 1, "num_sequences": 4}
    loader = open_loader(stream(is_shuffled=is_shuffled, lanes=4, sequences=4, validation=validation))
    held_out = "".join(chr(t) for b in loader.validation_batches() for t in b.tokens_MBN.flatten().tolist())
    text = "".join(chr(token) for step in _steps(loader, 240) for row in step for token in row)
    assert (loader.epoch or 0) < 1
    numbers = Counter(number for number in range(NUM_ROWS) if f"{number:04d}" in text)
    reserved = [number for number in range(NUM_ROWS) if f"{number:04d}" in held_out]
    assert not set(reserved) & numbers.keys(), "validation keeps its documents"
    assert len(numbers) > NUM_ROWS * 0.3


def test_nothing_is_read_or_tokenised_on_two_ranks(
    stream: Callable[..., Recipe], open_loader: Callable[..., Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counter[str]()

    def counted(kind: type, name: str) -> None:
        call = getattr(kind, name)

        def count(*arguments: Any) -> Any:
            counts[name] += 1
            return call(*arguments)

        monkeypatch.setattr(kind, name, count)

    counted(ByteTokenizer, "encode_documents")
    counted(Rows, "next")
    work = {}
    for dp_size in (1, 16):
        counts.clear()
        _together([open_loader(stream(), rank, dp_size) for rank in range(dp_size)], 6)
        work[dp_size] = dict(counts)
    assert work[16] == work[1]


def test_other_batch_size_keeps_the_places(stream: Callable[..., Recipe], open_loader: Callable[..., Loader]) -> None:
    before, after = open_loader(stream(lanes=8)), open_loader(stream(lanes=8, sequences=4))
    _steps(before, 3)
    after.load_state_dict(before.state_dict())
    later = _steps(after, 12)
    expected = [row for step in _steps(before, 3) for row in step]
    assert sorted(row for step in later for row in step) == sorted(expected)


def test_states_of_others_are_refused(stream: Callable[..., Recipe], open_loader: Callable[..., Loader]) -> None:
    lanes, whole = open_loader(stream()), open_loader(stream(lanes=0))
    with pytest.raises(ValueError, match=r"no stream in lanes.*data.stream_lanes back \(0 for a stream from before"):
        lanes.load_state_dict(whole.state_dict())
    with pytest.raises(ValueError, match="the checkpoint's stream is in lanes, this run's is not"):
        whole.load_state_dict(lanes.state_dict())
    with pytest.raises(ValueError, match="the checkpoint's stream has 32 lanes, this run's has 16"):
        open_loader(stream(lanes=16)).load_state_dict(lanes.state_dict())
