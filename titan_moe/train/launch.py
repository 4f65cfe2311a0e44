"""Start the ranks of one host through torchrun, and return their exit code."""

import logging
import os
import signal
import sys
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from titan_moe.train.process import EXIT_BY_SIGNAL


def launch(num_ranks: int, argv: Sequence[str]) -> int:
    """Run `titan-moe` with these arguments on every rank. Returns the exit code of the first rank that failed, or 0.

    For a failed rank or a signal, torchrun prints a traceback of its own and exits with 1. Here the ranks' own messages
    and exit code remain. After SIGTERM the ranks save, for which torchrun waits 30 seconds;
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT (torch 2.13) sets another limit, also for ranks that hang after another one failed.
    """
    sys.stdout.flush()
    # divide the cores between ranks: torchrun would set one thread per rank, with a long warning
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // num_ranks)))
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        torchrun(["--standalone", "--nproc-per-node", str(num_ranks), "-m", "titan_moe", *argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        print(f"titan-moe: rank {rank} was ended by {signal.Signals(-failure.exitcode).name}", file=sys.stderr)
        return EXIT_BY_SIGNAL - failure.exitcode
    except SignalException as stopped:
        return EXIT_BY_SIGNAL + stopped.sigval
    return 0
