"""The cache: an entry is built once, found again, and never incomplete."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from titan_moe.data import making
from titan_moe.data.cache import Cache, folder_of
from titan_moe.data.checked_file import CheckedFile, CheckedWriter, DamagedFileError
from titan_moe.data.content import describe_files


class _Builder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "answer").write_text("42")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", is_builder=True, barrier=lambda: None)


def test_cache_entry_is_built_once_and_named_by_its_key(cache: Cache) -> None:
    build = _Builder()
    first = cache.get("text", ["a", 1], build, Path)
    assert (first / "answer").read_text() == "42"
    assert cache.get("text", ["a", 1], build, Path) == first
    assert build.calls == 1
    assert cache.get("text", ["a", 2], build, Path) != first
    assert build.calls == 2


def test_cache_key_changes_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    os.utime(file, (1, 1))
    before = describe_files([file])
    assert describe_files([file]) == before
    os.utime(file, (2, 2))
    assert describe_files([file]) != before


def test_cache_other_ranks_build_nothing_and_reach_the_barrier(cache: Cache) -> None:
    build, barriers = _Builder(), []

    def build_elsewhere() -> None:
        barriers.append("barrier")
        cache.get("text", "key", build, Path)

    waiting = Cache(cache.folder, is_builder=False, barrier=build_elsewhere)
    assert (waiting.get("text", "key", pytest.fail, Path) / "answer").exists()
    assert (build.calls, barriers) == (1, ["barrier"])


def test_cache_entry_missing_on_a_rank_is_an_error(tmp_path: Path) -> None:
    waiting = Cache(tmp_path, is_builder=False, barrier=lambda: None)
    with pytest.raises(FileNotFoundError, match="all ranks of a host must share data.cache_folder"):
        waiting.get("text", "key", pytest.fail, Path)


def test_cache_failed_build_leaves_nothing_and_reaches_the_barrier(cache: Cache) -> None:
    barriers: list[str] = []

    def fail(folder: Path) -> None:
        (folder / "answer").write_text("4")
        raise ValueError("bad document")

    with pytest.raises(ValueError, match="bad document"):
        Cache(cache.folder, is_builder=True, barrier=lambda: barriers.append("barrier")).get("text", "key", fail, Path)
    assert barriers == ["barrier"]
    assert list(cache.folder.iterdir()) == []


@pytest.mark.slow
def test_cache_killed_build_is_repeated_and_its_files_are_removed(cache: Cache) -> None:
    killed = f"""
import os, pathlib, signal
from titan_moe.data import making
from titan_moe.data.cache import Cache, folder_of
def build(folder):
    (folder / "answer").write_text("4")
    os.kill(os.getpid(), signal.SIGKILL)
Cache(pathlib.Path({str(cache.folder)!r}), True, lambda: None).get("text", "key", build, pathlib.Path)
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    (unfinished,) = cache.folder.iterdir()
    assert (unfinished / "answer").read_text() == "4"

    entry = cache.get("text", "key", _Builder(), Path)
    assert [path.name for path in entry.iterdir()] == ["answer"] and (entry / "answer").read_text() == "42"
    assert list(cache.folder.iterdir()) == [entry], "the next maker has its work folder at once"


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network storage."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_cache_without_locks_removes_what_is_old(cache: Cache, no_locks: None) -> None:
    entry = cache.get("text", "key", _Builder(), Path)
    left = [entry.with_name(f"{entry.name}.{number}.tmp") for number in range(2)]
    for folder in left:
        folder.mkdir()
        (folder / "answer").write_text("4")
    long_ago = time.time() - 7200
    for path in (left[0] / "answer", left[0]):
        os.utime(path, (long_ago, long_ago))
    (entry / "answer").unlink()
    entry.rmdir()
    assert (cache.get("text", "key", _Builder(), Path) / "answer").read_text() == "42"
    assert sorted(cache.folder.iterdir()) == [entry, left[1]], "one could be of a run that is still alive"


def test_cache_slower_builder_takes_the_entry_of_the_faster_one(cache: Cache, no_locks: None) -> None:
    def build_late(folder: Path) -> None:
        (folder / "answer").write_text("late")
        os_folder = next(cache.folder.iterdir())
        finished = os_folder.with_name(os_folder.name.split(".")[0])
        finished.mkdir()
        (finished / "answer").write_text("early")

    assert (cache.get("text", "key", build_late, Path) / "answer").read_text() == "early"
    assert len(list(cache.folder.iterdir())) == 1


def test_cache_builders_with_equal_process_ids_do_not_collide(cache: Cache, no_locks: None) -> None:
    """Runs in two containers may have the same process id."""
    files: list[str] = []

    def build_slowly(folder: Path) -> None:
        (folder / "first").write_text("4")
        cache.get("text", "key", _Builder(), Path)
        (folder / "second").write_text("2")
        files.extend(sorted(path.name for path in folder.iterdir()))

    assert [path.name for path in cache.get("text", "key", build_slowly, Path).iterdir()] == ["answer"]
    assert files == ["first", "second"]
    assert len(list(cache.folder.iterdir())) == 1


def test_cache_build_that_ends_during_cleanup_is_no_error(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = cache.folder / "text-0.tmp"
    monkeypatch.setattr(Path, "glob", lambda *_: iter([gone]))
    assert cache.get("text", "key", _Builder(), Path).exists()


def test_cache_folder_that_cannot_be_created_is_named_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache", is_builder=True, barrier=lambda: None)
    with pytest.raises(ValueError, match=r"data.cache_folder: .* cannot be created: Not a directory; give a writable"):
        cache.get("text", 1, _Builder(), Path)


def test_cache_entry_with_damage_is_built_again(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever byte of whatever file is other than it was written, or missing."""

    def build(folder: Path) -> None:
        builds.append(folder)
        with CheckedWriter(folder / "numbers") as file:
            file.write(b"0123456789")

    builds: list[Path] = []
    entry = cache.get("text", "key", build, Path)
    for number, name in enumerate(("numbers", "numbers.sha256")):
        whole = (entry / name).read_bytes()
        damaged = [whole[:-1], whole + b"0", b"", *(whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :] for i in (0, 9))]
        for contents in damaged:
            (entry / name).write_bytes(contents)
            assert cache.get("text", "key", build, Path) == entry
            assert (entry / name).read_bytes() == whole
            assert f"{entry / 'numbers'} is damaged: " in caplog.text and "; it is built again" in caplog.text
            caplog.clear()
        assert len(builds) == 1 + 5 * (number + 1)
    (entry / "numbers").unlink()
    cache.get("text", "key", build, Path)
    assert len(builds) == 12 and len(list(cache.folder.iterdir())) == 1
    reader = CheckedFile(entry / "numbers")
    (entry / "numbers").write_bytes(b"0123456780")
    assert cache.get("text", "key", build, lambda folder: CheckedFile(folder / "numbers")).read(0, 10) == b"0123456789"
    with pytest.raises(DamagedFileError, match="block 0 of 1"):  # another run, which has the damaged file open
        reader.read(0, 10)


def test_cache_is_built_by_one_process_while_others_wait(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(making, "_POLL_SECONDS", 0.005)
    built, waits = _Builder(), threading.Event()

    def build_slowly(folder: Path) -> None:
        waits.wait(10)
        built(folder)

    def others() -> None:
        while "waiting for another process, which makes" not in caplog.text:
            time.sleep(0.002)
        waits.set()

    with caplog.at_level("INFO"), ThreadPoolExecutor(4) as pool:
        pool.submit(others)
        entries = [pool.submit(cache.get, "text", "key", build_slowly, Path) for _ in range(3)]
        assert {(entry.result() / "answer").read_text() for entry in entries} == {"42"}
    assert built.calls == 1
    assert [path.name for path in entries[0].result().iterdir()] == ["answer"]
    assert len(list(cache.folder.iterdir())) == 1


def test_cache_maker_that_fails_leaves_its_place_to_those_who_wait(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "_POLL_SECONDS", 0.005)
    begun, calls = threading.Event(), []

    def build(folder: Path) -> None:
        calls.append(sorted(path.name for path in folder.iterdir()))
        (folder / "answer").write_text("42")
        begun.set()
        if len(calls) == 1:
            time.sleep(0.02)
            raise ValueError("the first one fails")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "text", "key", build, Path)
        begun.wait(10)
        second = pool.submit(cache.get, "text", "key", build, Path)
        with pytest.raises(ValueError, match="the first one fails"):
            first.result()
        assert (second.result() / "answer").read_text() == "42"
    assert calls == [[".lock"]] * 2


def test_cache_folder_is_beside_the_run_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        assert folder_of("", tmp_path / "runs" / name) == tmp_path / "runs" / "token_cache"
    assert folder_of("elsewhere", tmp_path / "runs" / "a") == Path("elsewhere")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert folder_of("", tmp_path / "a") == tmp_path / "a" / "token_cache"
