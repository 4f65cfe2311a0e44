"""Start the ranks of one machine through torchrun, and pass on how they ended."""

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

EXIT_BY_SIGNAL = 128
"""What shells add to the number of a signal that ended a process."""


def launch(num_ranks: int, words: Sequence[str]) -> int:
    """Run `titan-moe` with these words on every rank and return the exit code: of the first rank that failed, or 0.

    torchrun answers both a failed rank and a signal with a traceback of its own and the code 1, whatever the ranks
    have said; here their words and their code stand. At SIGTERM the ranks save, and torchrun gives them 30 seconds for
    it; TORCH_ELASTIC_SHUTDOWN_TIMEOUT gives more (torch 2.13), also to ranks that hang after another's failure.
    """
    sys.stdout.flush()
    try:
        torchrun(["--standalone", "--nproc-per-node", str(num_ranks), "-m", "titan_moe", *words])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else EXIT_BY_SIGNAL - code
    except SignalException as stopped:
        return EXIT_BY_SIGNAL + stopped.sigval
    return 0
