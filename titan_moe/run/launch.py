"""Start the ranks of one host through torchrun, and return their exit code."""

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import get_args_parser
from torch.distributed.run import main as torchrun

from titan_moe.run.failure import EXIT_BAD_RECIPE, Failure, recorded_failures
from titan_moe.run.parent_death import LAUNCHER_PID
from titan_moe.run.process import EXIT_BY_SIGNAL
from titan_moe.run.terminal import complain

STRAGGLERS_S = 1.0
"""Between two looks at which ranks are left."""
SIGNALS_OPTION = "--signals-to-handle"
CONSEQUENCE_S = 5.0
"""When a rank is killed, others report a broken connection within this time. After a failure torchrun sends SIGTERM to
all ranks, and later than this SIGKILL to those that do not end."""


def launch(num_ranks: int, argv: Sequence[str], limit_s: float = 0.0) -> int:
    """Run `titan-moe` with these arguments on every rank. Returns the exit code of the first rank that failed, or 0.

    For a failed rank or a signal, torchrun prints a traceback of its own and exits with 1. Here the ranks' own messages
    and exit code remain, and the last line has the words of the first failure: other ranks fail because of it, and
    print more. After SIGTERM or SIGHUP the ranks save, for which torchrun waits 30 seconds;
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT (torch 2.13) sets another limit. SIGUSR1 is passed on, and the ranks save without
    that limit. A rank that has not ended `limit_s` seconds after another one has is killed; 0 sets no limit.
    """
    sys.stdout.flush()
    # divide the cores between ranks: torchrun would set one thread per rank, with a long warning
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // num_ranks)))
    os.environ[LAUNCHER_PID] = str(os.getpid())
    for name in ("api", "errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").setLevel(logging.CRITICAL)
    have_ended = Event()
    previous = signal.getsignal(signal.SIGUSR1)
    if previous != signal.SIG_IGN:
        signal.signal(signal.SIGUSR1, _pass_on)
    with tempfile.TemporaryDirectory(prefix="titan_moe-") as logs:
        watcher = Thread(target=_kill_stragglers, args=(num_ranks, limit_s, Path(logs), have_ended), daemon=True)
        if limit_s:
            watcher.start()
        options = ["--standalone", "--nproc-per-node", str(num_ranks), "--log-dir", logs, *_signals_to_handle()]
        try:
            torchrun([*options, "-m", "titan_moe", *argv])
        except ChildFailedError as error:
            return _report(error, Path(logs))
        except SignalException as stopped:
            return EXIT_BY_SIGNAL + stopped.sigval
        finally:
            signal.signal(signal.SIGUSR1, previous)
            have_ended.set()
            del os.environ[LAUNCHER_PID]
            if limit_s:  # it must not be at work in a folder, or on standard error, that are going away
                watcher.join()
    return 0


def _kill_stragglers(num_ranks: int, limit_s: float, logs: Path, have_ended: Event) -> None:
    """Kill the ranks that are left when others have ended long ago: stopped ones, after their last step. After a
    failure torchrun ends them."""
    have_started, last_full = False, time.monotonic()
    while not have_ended.wait(STRAGGLERS_S) and not recorded_failures(logs):
        ranks = _pids_of_ranks()
        have_started |= len(ranks) == num_ranks
        if not have_started or len(ranks) in (0, num_ranks):
            last_full = time.monotonic()
        elif time.monotonic() - last_full > limit_s:
            message = f"{len(ranks)} of {num_ranks} ranks have not ended {limit_s:g} seconds after another; killed"
            complain(message)
            for pid in ranks:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            last_full = time.monotonic()


def _pids_of_ranks() -> list[int]:
    """The running ranks, which torchrun starts from this process's main thread; none where there is no /proc."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    with suppress(OSError):
        return [int(pid) for pid in children.read_text().split()]
    return []


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Send a signal on to the ranks, which answer it at the end of a step."""
    for pid in _pids_of_ranks():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _report(error: ChildFailedError, logs: Path) -> int:
    """Print the first failure of all ranks, unless all have refused the same recipe; returns its exit code."""
    failures = recorded_failures(logs)
    recorded = {failure.rank for failure in failures}
    for rank, ended in error.failures.items():
        if ended.exitcode > 0 and ended.exitcode != EXIT_BY_SIGNAL + signal.SIGINT and rank not in recorded:
            complain(f"rank {rank} has ended itself with exit code {ended.exitcode}")
            return ended.exitcode
        if ended.exitcode < 0 and not _is_ended_by_torchrun(ended, failures):
            complain(f"rank {rank} was ended by {signal.Signals(-ended.exitcode).name}")
            return EXIT_BY_SIGNAL - ended.exitcode
    if not failures:
        return error.get_first_failure()[1].exitcode
    first = failures[0]
    if first.exit_code != EXIT_BAD_RECIPE or len({failure.words for failure in failures}) > 1:
        complain(f"rank {first.rank} failed first: {first.words}")
    return first.exit_code


def _is_ended_by_torchrun(ended: ProcessFailure, failures: list[Failure]) -> bool:
    """Whether torchrun has ended a rank by a signal, because another one has failed."""
    if not failures:
        return False
    return -ended.exitcode == signal.SIGTERM or ended.timestamp > failures[0].time_s + CONSEQUENCE_S


def _signals_to_handle() -> list[str]:
    """Options that leave SIGHUP ignored, as under `nohup`, where torchrun would end the ranks."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    is_known = SIGNALS_OPTION in get_args_parser()._option_string_actions
    return [SIGNALS_OPTION, "SIGTERM,SIGINT,SIGQUIT"] if is_ignored and is_known else []
