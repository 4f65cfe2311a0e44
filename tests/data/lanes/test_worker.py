"""The process that reads the lanes of a rank: the same samples, errors, an early end, a late one."""

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.files_of_rows import write_rows

from titan_moe.config import Recipe
from titan_moe.data.bad_rows import BadRowError
from titan_moe.data.lanes.worker import WorkerSamples
from titan_moe.data.loader import Loader


@pytest.fixture
def make(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    write_rows(tmp_path / "a.jsonl", [{"text": f"{n}" * 9} if n != 15 else {"text": n} for n in range(200)])

    def make_(**data: Any) -> Recipe:
        own = {"source": "auto", "path": f"{tmp_path}/a.jsonl", "is_streamed": True, "stream_lanes": 4}
        return make_recipe(data=own | {"shuffle_buffer_sequences": 2} | data)

    return make_


def _worker(loader: Loader) -> WorkerSamples:
    assert isinstance(loader._training, WorkerSamples)
    return loader._training


def test_worker_gives_the_same_samples_and_its_end_is_noticed(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    alone, beside = (open_loader(make(bad_rows="skip", stream_has_worker=has)) for has in (False, True))
    for _ in range(6):
        assert alone.next_step().tokens_MBN.tolist() == beside.next_step().tokens_MBN.tolist()
        assert alone.state_dict() == beside.state_dict()
    assert (len(alone.bad_rows), len(beside.bad_rows)) == (1, 1)
    assert alone.epoch == beside.epoch
    process = _worker(beside)._process
    assert process is not None
    if (maps := Path(f"/proc/{process.pid}/maps")).exists():
        assert "libtorch" not in maps.read_text(), "it starts in a moment, and is small"
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"that reads data for this rank has ended with signal SIGKILL"):
        for _ in range(1000):  # more than lie in the pipe
            beside.read_ahead()
    state = beside.state_dict()
    assert state == alone.state_dict(), "that of the last step"
    beside.load_state_dict(state)
    assert alone.next_step().tokens_MBN.tolist() == beside.next_step().tokens_MBN.tolist()
    process = _worker(beside)._process
    assert process is not None and process.poll() is None
    del beside
    gc.collect()
    assert process.poll() is not None, "it ends with the loader"


def test_error_of_the_worker_reaches_the_rank(make: Callable[..., Recipe], open_loader: Callable[..., Loader]) -> None:
    loader = open_loader(make())
    with pytest.raises(BadRowError, match="a.jsonl, line 16, has int, not text"):
        for _ in range(9):
            loader.next_step()
