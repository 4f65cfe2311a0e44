"""Read the lanes of a rank in a process beside it, which is always one batch ahead.

The process is a Python of its own, neither forked nor a copy of the program's `__main__`: CUDA and threads of the rank
do not reach it. It ends with the rank, because its writes then fail.
"""

import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from titan_moe.config import Recipe
from titan_moe.data.bad_rows import BadRows
from titan_moe.data.sample import Sample
from titan_moe.data.samples import Samples
from titan_moe.data.tokenizer import Tokenizer, build_tokenizer

_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
"""Signals to all processes of a job, after which the rank still saves; it ends its worker itself."""


OpenSamples = Callable[[Recipe, Tokenizer, BadRows], Samples]


class WorkerSamples(Samples):
    """Samples of streams that ranks divide, read by a worker process from the first `take` on."""

    is_divided = True

    def __init__(self, recipe: Recipe, open_: OpenSamples, samples: Samples, bad_rows: BadRows) -> None:
        """The process calls `open_`, which can be pickled; `samples`, the same, are not read here."""
        self._recipe, self._open, self._samples, self._bad_rows = recipe, open_, samples, bad_rows
        self._note_position()
        self._work: tuple[int, range] | None = None
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end = lambda: None

    def epoch_after(self, num_samples: int) -> float | None:
        return self._epoch

    def epochs(self) -> dict[str, float]:
        return self._epochs

    def take(self, first: int, count: int, mine: range) -> list[Sample]:
        if self._work != (count, mine) or self._connection is None:
            self._start(count, mine)
        assert self._connection is not None and self._process is not None
        try:
            found, *facts = self._connection.recv()
        except (EOFError, OSError) as error:  # it may have ended in the middle of a message
            code = self._process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._work = None
            raise RuntimeError(
                f"the process {self._process.pid} that reads data for this rank has ended with {how}; its output says "
                "why, or the machine ran out of memory: lower data.shuffle_buffer_sequences, or set "
                "data.stream_has_worker = false"
            ) from error
        if isinstance(found, BaseException):
            self._work = None
            raise found
        self._state, self._epoch, self._epochs, bad_rows = facts
        self._bad_rows.count(bad_rows)
        return [Sample(*sample) for sample in found]

    def state(self) -> str:
        return self._state

    def merge(self, states: Any) -> str:
        return self._samples.merge(states)

    def load_state(self, state: str) -> None:
        self._samples.load_state(state)
        self.close()
        self._note_position()

    def _note_position(self) -> None:
        self._state, self._epoch, self._epochs = _position(self._samples)

    def close(self) -> None:
        """End the process."""
        self._end()
        self._connection = self._process = self._work = None

    def _start(self, count: int, mine: range) -> None:
        self.close()
        own, other = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "titan_moe.data.lanes.worker", str(other.fileno())]
        process = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment, stdin=subprocess.DEVNULL)
        other.close()
        connection = Connection(own.detach())
        self._connection, self._process, self._work = connection, process, (count, mine)
        self._end = weakref.finalize(self, _end, connection, process)
        connection.send((self._recipe, self._open, self._state, count, mine))


def _end(connection: Connection, process: "subprocess.Popen[bytes]") -> None:
    connection.close()
    process.kill()
    process.wait()


def _work(connection: Connection) -> None:
    """Send the batches of all steps, one after the other. A send waits until the rank has read the one before."""
    recipe, open_, state, count, mine = connection.recv()
    data = recipe.data
    try:
        tokenizer = build_tokenizer(
            data.tokenizer, data.source, recipe.model.vocab_size, split_special_tokens=data.split_special_tokens
        )
        bad_rows = BadRows(data.bad_rows)
        samples = open_(recipe, tokenizer, bad_rows)
        samples.load_state(state)
        while True:
            taken = samples.take(0, count, mine)
            connection.send(([tuple(sample) for sample in taken], *_position(samples), len(bad_rows)))
    except (BrokenPipeError, ConnectionResetError):
        return  # the rank has ended, or reads something else
    except Exception as error:
        connection.send((_plain(error),))


def _position(samples: Samples) -> tuple[str, float | None, dict[str, float]]:
    return samples.state(), samples.epoch_after(0), samples.epochs()


def _plain(error: Exception) -> Exception:
    """An error that can be sent: its words alone, of its own type where that is of Python or of this package."""
    is_known = type(error).__module__.partition(".")[0] in ("builtins", "titan_moe")
    words = str(error) if is_known else f"{type(error).__name__}: {error}"
    try:
        return type(error)(words) if is_known else RuntimeError(words)
    except TypeError:
        return RuntimeError(words)


if __name__ == "__main__":
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    _work(Connection(int(sys.argv[1])))
