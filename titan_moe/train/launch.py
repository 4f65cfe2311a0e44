"""Start the ranks of one machine through torchrun, and pass on how they ended."""

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


def launch(num_ranks: int, words: Sequence[str]) -> int:
    """Run `titan-moe` with these words on every rank and return the exit code: of the first rank that failed, or 0.

    torchrun answers both a failed rank and a signal with a traceback of its own and the code 1, whatever the ranks
    have said; here their words and their code stand. At SIGTERM the ranks save, and torchrun gives them 30 seconds for
    it; TORCH_ELASTIC_SHUTDOWN_TIMEOUT gives more (torch 2.13), also to ranks that hang after another's failure.
    """
    sys.stdout.flush()
    # the cores, shared out: torchrun would give each rank one thread, and say so at length
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // num_ranks)))
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        torchrun(["--standalone", "--nproc-per-node", str(num_ranks), "-m", "titan_moe", *words])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        print(f"titan-moe: rank {rank} was ended by {signal.Signals(-failure.exitcode).name}", file=sys.stderr)
        return EXIT_BY_SIGNAL - failure.exitcode
    except SignalException as stopped:
        return EXIT_BY_SIGNAL + stopped.sigval
    return 0
