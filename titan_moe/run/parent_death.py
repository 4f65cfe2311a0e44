"""End this rank when its launcher ends. Imports no torch, so that it is called before anything slow."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
LAUNCHER_PID = "TITAN_MOE_LAUNCHER_PID"
"""Environment variable with the process id of the launcher, set by `launch`."""


def die_with_parent() -> None:
    """Let Linux kill this process when its parent, the launcher, ends in any way. Elsewhere it does nothing.

    SIGKILL, because a rank without its launcher has lost the store and cannot save together with the others; the last
    complete checkpoint is the one to resume from. Torchrun starts its ranks from its main thread, whose end counts.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    expected = os.environ.pop(LAUNCHER_PID, None)  # not for processes that this one starts
    if expected is not None and os.getppid() != int(expected):  # it has ended before the call
        os.kill(os.getpid(), signal.SIGKILL)
