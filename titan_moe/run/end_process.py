"""End a process whose command is done, also if a thread goes on."""

import atexit
import logging
import os
import sys
import threading
import time
from threading import Thread

from titan_moe.run.terminal import complain

PATIENCE_S = 10.0
TICK_S = 0.1


def end_soon(exit_code: int, patience_s: float = PATIENCE_S) -> None:
    """Limit how long the process waits for threads of other code, such as a user's class; call it last.

    Python ends a process only after all threads that are no daemons. After `patience_s` seconds the process names
    those that are left, runs what was registered for its exit, and ends with `exit_code`.
    """
    if _left():
        Thread(target=_end, args=(exit_code, patience_s), name="end of the process", daemon=True).start()


def _left() -> list[Thread]:
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]


def _end(exit_code: int, patience_s: float) -> None:
    limit = time.monotonic() + patience_s
    while time.monotonic() < limit:
        if not _left():
            return
        time.sleep(TICK_S)
    threads = ", ".join(f"{thread.name} at {_place(thread)}" for thread in _left())
    message = f"after the end of the command these threads went on for {patience_s:g} seconds: {threads}"
    complain(f"{message}; the process ends without them (a daemon thread ends by itself)")
    at_exit = Thread(target=atexit._run_exitfuncs, daemon=True)  # in a thread: one of them may wait for those above
    at_exit.start()
    at_exit.join(patience_s)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)


def _place(thread: Thread) -> str:
    """Where a thread is, as `file:line`."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "its end"
