"""The cache: built once, found again, never half there."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titan_moe.data.cache import Cache, describe_files


class _Builder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "answer").write_text("42")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", is_builder=True, barrier=lambda: None)


def test_an_entry_is_built_once_and_named_by_its_key(cache: Cache) -> None:
    build = _Builder()
    first = cache.get("text", ["a", 1], build)
    assert (first / "answer").read_text() == "42"
    assert cache.get("text", ["a", 1], build) == first
    assert build.calls == 1
    assert cache.get("text", ["a", 2], build) != first
    assert build.calls == 2


def test_a_file_that_changed_is_another_key(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    os.utime(file, (1, 1))
    before = describe_files([file])
    assert describe_files([file]) == before
    os.utime(file, (2, 2))
    assert describe_files([file]) != before


def test_other_ranks_build_nothing_and_meet_at_the_barrier(cache: Cache) -> None:
    build, meetings = _Builder(), []

    def build_elsewhere() -> None:
        meetings.append("barrier")
        cache.get("text", "key", build)

    waiting = Cache(cache.folder, is_builder=False, barrier=build_elsewhere)
    assert (waiting.get("text", "key", pytest.fail) / "answer").exists()
    assert (build.calls, meetings) == (1, ["barrier"])


def test_a_rank_that_cannot_see_the_entry_says_so(tmp_path: Path) -> None:
    waiting = Cache(tmp_path, is_builder=False, barrier=lambda: None)
    with pytest.raises(FileNotFoundError, match="all ranks must share data.cache_folder"):
        waiting.get("text", "key", pytest.fail)


def test_a_build_that_fails_leaves_nothing_and_lets_the_others_go(cache: Cache) -> None:
    meetings: list[str] = []

    def fail(folder: Path) -> None:
        (folder / "answer").write_text("4")
        raise ValueError("bad document")

    with pytest.raises(ValueError, match="bad document"):
        Cache(cache.folder, is_builder=True, barrier=lambda: meetings.append("barrier")).get("text", "key", fail)
    assert meetings == ["barrier"]
    assert list(cache.folder.iterdir()) == []


def test_a_killed_build_is_done_again_and_its_remains_go(cache: Cache) -> None:
    killed = f"""
import os, pathlib, signal
from titan_moe.data.cache import Cache
def build(folder):
    (folder / "answer").write_text("4")
    os.kill(os.getpid(), signal.SIGKILL)
Cache(pathlib.Path({str(cache.folder)!r}), True, lambda: None).get("text", "key", build)
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    (remains,) = cache.folder.iterdir()
    assert (remains / "answer").read_text() == "4"

    entry = cache.get("text", "key", _Builder())
    assert (entry / "answer").read_text() == "42"
    assert remains.exists()  # it could be the build of a run that is alive

    (entry / "answer").unlink()
    entry.rmdir()
    long_ago = time.time() - 7200
    for path in (remains / "answer", remains):
        os.utime(path, (long_ago, long_ago))
    assert (cache.get("text", "key", _Builder()) / "answer").read_text() == "42"
    assert list(cache.folder.iterdir()) == [entry]


def test_the_slower_of_two_builders_takes_the_faster_ones_entry(cache: Cache) -> None:
    def build_late(folder: Path) -> None:
        (folder / "answer").write_text("late")
        os_folder = next(cache.folder.iterdir())
        finished = os_folder.with_name(os_folder.name.split(".")[0])
        finished.mkdir()
        (finished / "answer").write_text("early")

    assert (cache.get("text", "key", build_late) / "answer").read_text() == "early"
    assert len(list(cache.folder.iterdir())) == 1


def test_two_builders_of_one_process_id_keep_out_of_each_others_way(cache: Cache) -> None:
    """As runs of two containers may be."""
    left: list[str] = []

    def build_slowly(folder: Path) -> None:
        (folder / "first").write_text("4")
        cache.get("text", "key", _Builder())
        (folder / "second").write_text("2")
        left.extend(sorted(path.name for path in folder.iterdir()))

    assert [path.name for path in cache.get("text", "key", build_slowly).iterdir()] == ["answer"]
    assert left == ["first", "second"]
    assert len(list(cache.folder.iterdir())) == 1


def test_a_build_that_ends_while_another_looks_for_remains_is_no_failure(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = cache.folder / "text-0.tmp"
    monkeypatch.setattr(Path, "glob", lambda *_: iter([gone]))
    assert cache.get("text", "key", _Builder()).exists()


def test_a_folder_that_cannot_be_made_is_told_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache", is_builder=True, barrier=lambda: None)
    with pytest.raises(ValueError, match=r"data.cache_folder: .* cannot be made: Not a directory; name a folder"):
        cache.get("text", 1, _Builder())
