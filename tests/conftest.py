"""Fixtures of all tests: pools of processes for multi-rank tests, one a file; processes that run tests beside, in
Triton's interpreter, of launches and of ranks."""

import atexit
import gc
import inspect
import io
import os
import runpy
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

# Of this process and of all that it starts, before NumPy and PyTorch are imported: threads that wait for shares of tiny
# products spin, and the processes beside want their cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as in runs

import torch  # noqa: E402
from support import forks  # noqa: E402
from support.costs import cost_of  # noqa: E402

from titan_moe.versions import REPORTS_LEAKS_AT_EXIT  # noqa: E402

TIMEOUT_SECONDS = 480
SECONDS_AFTER_A_FAILURE = 10
"""A rank whose peer has failed waits in a collective: what it still has to say, it says at once."""
BESIDE_TIMEOUT_SECONDS = 3600
"""Of a process beside, after all others; none where options ask for more layouts or schedules."""
SECONDS_TO_CLOSE = 30
ENDS_SOON_SECONDS = 20
if not torch.cuda.is_available():  # processes that compile have more to import than they gain on a few cores
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
COLLECTION_THRESHOLDS = (20_000, 10, 100)
"""Of Python's garbage, as in support/rank_worker.py."""
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if IS_INTERPRETED:
    runpy.run_path(str(Path(__file__).parent / "support" / "quick_interpreter.py"))


class Ranks:
    """Runs a test module's top-level function on several gloo ranks: `ranks(4, function, *args)` -> results by rank."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pipes, self.workers, self.num_jobs = folder, [], [], 0
        self.context = forks.context()

    def __call__(self, num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        self._grow(num_ranks)
        self.num_jobs += 1
        job = (
            inspect.getfile(function),
            function.__name__,
            args,
            num_ranks,
            str(self.folder / f"store-{self.num_jobs}"),
        )
        for pipe in self.pipes[:num_ranks]:
            pipe.send(job)
        answers = self._answers(self.pipes[:num_ranks])
        failures = [f"rank {rank}:\n{text}" for rank, (is_good, text) in enumerate(answers) if not is_good]
        if failures:
            self.close()
            pytest.fail("\n".join(failures))
        return [torch.load(io.BytesIO(result), weights_only=False) for _, result in answers]

    def _answers(self, pipes: list[Connection]) -> list[tuple[bool, Any]]:
        answers: dict[Connection, tuple[bool, Any]] = {}
        end = time.monotonic() + TIMEOUT_SECONDS
        while waiting := [pipe for pipe in pipes if pipe not in answers]:
            ready = wait(waiting, max(end - time.monotonic(), 0))
            if not ready:
                break
            answers |= {pipe: _hear(pipe) for pipe in ready}
            if not all(answers[pipe][0] for pipe in ready):
                end = min(end, time.monotonic() + SECONDS_AFTER_A_FAILURE)
        return [answers.get(pipe, (False, "no answer in time")) for pipe in pipes]

    def _grow(self, num_ranks: int) -> None:
        worker = str(Path(__file__).parent / "support" / "rank_worker.py")
        for rank in range(len(self.pipes), num_ranks):
            pipe, theirs = self.context.Pipe()
            names = {"PIPE": theirs, "RANK": rank, "STDERR": reduction.DupFd(2)}
            process = self.context.Process(target=runpy.run_path, args=(worker, names, "__main__"))
            process.start()
            theirs.close()
            self.pipes.append(pipe)
            self.workers.append(process)

    def close(self) -> None:
        """End all ranks; the next call starts new ones."""
        for worker in self.workers:
            worker.kill()
            worker.join()
        self.pipes, self.workers = [], []


def _hear(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        return False, "its process has ended"


@pytest.fixture(scope="session")
def new_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Ranks]]:
    """Makes pools of processes of their own, for tests that cannot share them with all others."""
    with ExitStack() as pools:
        yield lambda: pools.enter_context(closing(Ranks(tmp_path_factory.mktemp("ranks"))))


@pytest.fixture(scope="module")
def ranks(new_ranks: Callable[[], Ranks]) -> Iterator[Ranks]:
    """A pool for each file of tests: what one leaves behind is not another's."""
    with closing(new_ranks()) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks_of_a_size(new_ranks: Callable[[], Ranks]) -> Callable[..., list[Any]]:
    """As `ranks`, but another number of ranks is other processes: for GPUs that share memory.

    PyTorch numbers the meetings over symmetric memory in each process: two ranks that have met before, and two that
    have not, would look for each other under different numbers, for ever.
    """
    pools: defaultdict[int, Ranks] = defaultdict(new_ranks)
    return lambda num_ranks, function, *args: pools[num_ranks](num_ranks, function, *args)


@pytest.fixture
def ends_soon() -> Iterator[None]:
    """Fail a test of what once never ended, instead of the whole run."""

    def fail(*_: Any) -> None:
        raise AssertionError(f"it has not ended after {ENDS_SOON_SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(ENDS_SOON_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def takes_all_steps(request: pytest.FixtureRequest) -> bool:
    """Whether layouts are compared over all steps: with `--layouts`."""
    return request.config.getoption("--layouts") is not None


PYTEST = """
import os, sys, pytest
os.dup2(2, 1)
sys.exit(pytest.main(sys.argv[1:]))
"""


class Beside:
    """Runs the tests of a mark in a process of its own, which begins with the session and works beside it.

    `arguments` are files and options of pytest.
    """

    def __init__(self, arguments: list[str], mark: str, num_moved: int, server: forks.Server | None) -> None:
        """`num_moved` tests run there instead of here. It is a fork of this process's server, or of the one given."""
        self.num_moved = num_moved
        self.timeout = None if any(argument.startswith("--") for argument in arguments) else BESIDE_TIMEOUT_SECONDS
        variables = os.environ | {"PYTEST_ADDOPTS": ""} | (server.variables if server else {})
        with server.used() if server else nullcontext():
            self.process = forks.Forked(PYTEST, ["-v", "-m", mark, *arguments], variables)

    def finish(self) -> tuple[int, str]:
        """Wait for it: its exit code, and what it printed."""
        try:
            code = self.process.wait(self.timeout)
        except subprocess.TimeoutExpired:  # a barrier that waits for ever, perhaps: the log tells where
            self.process.send_signal(signal.SIGINT)  # it closes its pools
            try:
                self.process.wait(SECONDS_TO_CLOSE)
            except subprocess.TimeoutExpired:
                self.process.kill()
            code = self.process.wait() or -1
        return code, self.process.communicate(SECONDS_TO_CLOSE)[1]  # its ranks may hang, and write there too

    def assert_all_ran(self) -> None:
        """Wait for it: all passed or skipped themselves, and none was left out."""
        code, log = self.finish()
        num_ran = sum(" PASSED" in line or " SKIPPED" in line for line in log.splitlines())
        assert code == 0 and " PASSED" in log and num_ran >= self.num_moved, f"{num_ran} of {self.num_moved}\n{log}"


BESIDE = {"interpreter": "interpreted", "launches": "launches", "pools": "ranks", "slow_ones": "one_process"}
"""Fixture: a mark."""
SHARES = {"interpreter": 2, "launches": 1, "pools": 2, "slow_ones": 2}
"""Fixtures, whose tests leave the process that waits for them, and the processes that share them: ranks wait for each
other, and two pools keep the cores busy where one would not."""
STARTED = pytest.StashKey[dict[str, list[Beside]]]()


RANKS = {"ranks", "new_ranks", "ranks_of_a_size"}
PROCESSES = {*RANKS, *BESIDE}
"""Fixtures that start processes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    help_ = "random layouts of tests/distributed/test_layouts.py, and 20 steps of all layouts"
    parser.addoption("--layouts", type=int, help=help_)
    help_ = "also the cases that the mark `few` leaves out, and all schedules beside all axes in tests/distributed"
    parser.addoption("--all-cases", action="store_true", help=help_)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.all_cases:
        _keep_few(config, items)
    for item in items:
        if RANKS.intersection(getattr(item, "fixturenames", ())) and not _is_elsewhere(item):
            item.add_marker("ranks")
        starts_processes = PROCESSES.intersection(getattr(item, "fixturenames", ()))
        if not starts_processes and not any(item.get_closest_marker(name) for name in ("slow", "gpu", "interpreted")):
            item.add_marker("fast")
        elif item.get_closest_marker("slow") and not starts_processes and not _is_elsewhere(item):
            item.add_marker("one_process")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("interpreted") and not IS_INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="runs in Triton's interpreter: tests/test_interpreter.py"))
    files_of_ranks = {item.path for item in items if RANKS.intersection(getattr(item, "fixturenames", ()))}
    # files with tests of ranks first: their other tests launch runs and wait, while the processes beside use the cores
    items.sort(key=lambda item: (len(_waits_for(item)), item.path not in files_of_ranks))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what was imported is no garbage: nobody looks through it again
    if REPORTS_LEAKS_AT_EXIT.is_here:
        atexit.register(gc.unfreeze)
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    waited_for = {name for item in session.items for name in _waits_for(item)}
    if session.config.option.collectonly:
        return
    of_mark = {mark: [item for item in session.items if item.get_closest_marker(mark)] for mark in BESIDE.values()}
    if session.config.option.markexpr:  # none of their tests was asked for
        unasked = {name for name in waited_for if not of_mark[BESIDE[name]]}
        waited_for -= unasked
        left_out = [item for item in session.items if unasked & _waits_for(item)]
        session.items[:] = [item for item in session.items if item not in left_out]
        session.config.hook.pytest_deselected(items=left_out)
    # a whole run: they need not run here too
    moved = {item for name in waited_for for item in of_mark[BESIDE[name]]}
    session.items[:] = [item for item in session.items if item not in moved]
    session.config.hook.pytest_deselected(items=list(moved))
    num_layouts = session.config.option.layouts
    options = [] if num_layouts is None else [f"--layouts={num_layouts}"]
    options += ["--all-cases"] * session.config.option.all_cases
    started: dict[str, list[Beside]] = {}
    interpreting = forks.Server(TRITON_INTERPRET="1")  # Triton must be told before it is imported
    for name in sorted(waited_for, key=list(SHARES).index):
        mark, server = BESIDE[name], interpreting if name == "interpreter" else None
        shares = _shares(of_mark[mark], mark, SHARES[name]) or [([str(Path(__file__).parent)], 0)]
        started[name] = [Beside(files + options, mark, num_moved, server) for files, num_moved in shares]
    session.config.stash[STARTED] = started


def _shares(items: list[pytest.Item], mark: str, number: int) -> list[tuple[list[str], int]]:
    """Files whose tests cost about the same, and how many these are."""
    tests = Counter(item.path for item in items)
    costs = {file: cost_of(file, mark, num_tests) for file, num_tests in tests.items()}
    shares: list[tuple[list[str], int]] = [([], 0) for _ in range(number)]
    sums = [0.0] * number
    for file in sorted(tests, key=lambda file: -costs[file]):
        smallest = sums.index(min(sums))
        files, num_before = shares[smallest]
        shares[smallest] = [*files, str(file)], num_before + tests[file]
        sums[smallest] += costs[file]
    return [share for share in shares if share[0]]


def pytest_unconfigure(config: pytest.Config) -> None:
    for besides in config.stash.get(STARTED, {}).values():
        for beside in besides:
            beside.process.kill()


@pytest.fixture(scope="session")
def interpreter(request: pytest.FixtureRequest) -> list[Beside]:
    return request.config.stash[STARTED]["interpreter"]


@pytest.fixture(scope="session")
def launches(request: pytest.FixtureRequest) -> list[Beside]:
    return request.config.stash[STARTED]["launches"]


@pytest.fixture(scope="session")
def slow_ones(request: pytest.FixtureRequest) -> list[Beside]:
    return request.config.stash[STARTED]["slow_ones"]


@pytest.fixture(scope="session")
def pools(request: pytest.FixtureRequest) -> list[Beside]:
    return request.config.stash[STARTED]["pools"]


def _keep_few(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that the mark `few` does not name, all if it names none, unless their node ids were asked
    for."""
    asked = {(Path(file).resolve(), test) for file, _, test in (arg.partition("::") for arg in config.args)}
    cases: defaultdict[tuple[Path, str], set[str]] = defaultdict(set)
    named: dict[tuple[Path, str], set[str]] = {}
    kept, left_out = [], []
    for item in items:
        kept.append(item)
        if not (mark := item.get_closest_marker("few")):
            continue
        test, case = (item.path, item.originalname), item.callspec.id if hasattr(item, "callspec") else ""
        cases[test].add(case)
        named[test] = set(mark.args)
        if case not in mark.args and (item.path, item.name) not in asked:
            left_out.append(kept.pop())
    if not any(test for _, test in asked):  # all cases were collected
        for test, ids in named.items():
            if unknown := ids - cases[test]:
                raise pytest.UsageError(f"{test[0]}: {test[1]} has no cases {sorted(unknown)} that few cases may be")
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def _is_elsewhere(item: pytest.Item) -> bool:
    """Whether it runs on GPUs, or in another of the processes beside."""
    return any(item.get_closest_marker(name) for name in ("gpu", "interpreted", "launches"))


def _waits_for(item: pytest.Item) -> set[str]:
    return BESIDE.keys() & set(getattr(item, "fixturenames", ()))
