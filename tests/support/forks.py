"""Forks of one process that has imported what ranks and runs need, which takes each of them seconds otherwise."""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

IMPORTED = (
    "titan_moe.training.build",
    "titan_moe.cli",
    "titan_moe.run.launch",
    "titan_moe.training.trainer",
    "pytest",
    # the compiler, which PyTorch imports at the first compilation
    "torch._dynamo.backends.debugging",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_dynamo",
    "torch._export.passes.add_runtime_assertions_for_constraints_pass",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.debug",  # a quarter of a second for each rank
    "torch.distributed.tensor.experimental._attention",
    "torch.profiler",
    "sympy.combinatorics",
    "sympy.tensor",
)
"""Modules that are imported once for all; one that this PyTorch lacks is left out."""
POLL_S = 0.01
EXIT_OF_AN_ERROR = 1


def context() -> BaseContext:
    """What starts forks; where that process may have asked for GPUs, which do not survive a fork, new processes."""
    found = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    if found.get_start_method() == "forkserver":
        found.set_forkserver_preload(list(IMPORTED))
        with mock.patch.dict(os.environ, PYTHONWARNINGS="ignore:resource_tracker"):  # of semaphores of killed ranks
            resource_tracker.ensure_running()
    return found


class Server:
    """A process of its own that is forked, for another environment than this process has while it is imported."""

    def __init__(self, **variables: str) -> None:
        self.variables, self.server = variables, forkserver.ForkServer()
        self.server.set_forkserver_preload(list(IMPORTED))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within the `with` block forks are of it, and so are those that they start later."""
        connect = mock.patch.object(forkserver, "connect_to_new_process", self.server.connect_to_new_process)
        with (
            mock.patch.dict(os.environ, self.variables),
            connect,
            mock.patch.object(forkserver, "ensure_running", self.server.ensure_running),
        ):
            yield


class Forked:
    """A script in a process of its own, as by `python -c SCRIPT WORDS`, with what is used of `subprocess.Popen`."""

    def __init__(self, script: str, words: list[str], environment: dict[str, str], folder: Path | None = None) -> None:
        self.said = b""
        self.pipe, theirs = context().Pipe(duplex=False)
        place = str(folder or Path.cwd())
        self.process = context().Process(target=_run, args=(script, words, environment, theirs, place))
        self.process.start()
        LIVING.add(self)
        theirs.close()
        self.pid = self.process.pid or 0
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        with self.pipe:
            while heard := os.read(self.pipe.fileno(), 65536):
                self.said += heard

    @property
    def returncode(self) -> int | None:
        """As of a child: the negative number of the signal that has ended it."""
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("titan-moe", timeout or 0.0, stderr=self.said)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Wait for its end, and for that of all that write to its standard error; what they wrote."""
        self.listener.join(timeout)
        if self.listener.is_alive():
            raise subprocess.TimeoutExpired("titan-moe", timeout or 0.0, stderr=self.said)
        self.wait(timeout)
        return None, self.said.decode()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and that is not told yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


LIVING = weakref.WeakSet[Forked]()


@atexit.register
def _kill_all() -> None:
    """Before multiprocessing waits for them, without a limit: those of a test that has failed."""
    for process in list(LIVING):
        process.kill()


def _run(script: str, words: list[str], environment: dict[str, str], said: Connection, folder: str) -> NoReturn:
    """What a fork does; it writes its standard error to `said`."""
    os.chdir(folder)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    os.dup2(said.fileno(), 2)
    said.close()
    server = forkserver._forkserver
    if server._forkserver_address is not None:  # what this fork starts are forks of the same process
        server.ensure_running = lambda: None
    with _ends_as_a_program():
        _start_anew(environment)
        sys.argv = ["-c", *words]
        exec(script, {"__name__": "__main__"})


def fork_ranks() -> None:
    """From now on, ranks that torchrun starts from this process are forks of it."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda handler, args, environment: Rank(handler, args, environment)


class Rank:
    """A rank that torchrun starts, with what torchrun uses of `subprocess.Popen`: `python -u -m titan_moe WORDS`."""

    returncode: int | None = None

    def __init__(self, handler: Any, args: tuple[str, ...], environment: dict[str, str]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            return
        with _ends_as_a_program():
            os.setsid()
            for finalizer in list(weakref.finalize._registry):
                finalizer.atexit = False  # the launcher's folder of logs is not this rank's
            for number, file in ((1, handler._stdout), (2, handler._stderr)):
                if file is not None:
                    os.dup2(file.fileno(), number)
            _start_anew(environment)
            assert args[:4] == (sys.executable, "-u", "-m", "titan_moe"), args
            sys.argv = list(args[3:])
            from titan_moe import cli

            sys.exit(cli.main())

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("titan-moe", timeout or 0.0)
            time.sleep(POLL_S)
        return code


def _start_anew(environment: dict[str, str]) -> None:
    """What a new process of Python has, and a fork has of its parent: environment, signals."""
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    for number in signal.valid_signals():
        with suppress(OSError, ValueError):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _ends_as_a_program() -> Iterator[None]:
    """End this process after what is inside, whatever that raises, as Python ends one."""
    code: Any = 0
    try:
        yield
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = EXIT_OF_AN_ERROR
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = EXIT_OF_AN_ERROR
    threading._shutdown()
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)
