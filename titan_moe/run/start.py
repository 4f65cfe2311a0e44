"""The start of a command, before and while torch is imported."""

import atexit
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from titan_moe.run.terminal import MessageFormat

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of PyTorch's allocator of GPU memory. It reads the second one if both are set."""


def set_variables_of_torch(device: str) -> None:
    """Set what torch and OpenMP read once, before torch is imported, where the user has not."""
    # threads that spin while waiting slow down other processes on the same cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # kernels are tested with fused multiplications and additions; triton 3.9 warns that 3.10 will have them no more
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if device != "cpu" and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        # freed blocks that lie beside each other become one: less free memory between tensors
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


@contextmanager
def imports_frozen() -> Iterator[None]:
    """Exclude the objects of the enclosed imports from garbage collection, which makes start and exit faster. None of
    them is garbage, but the collector would scan all of them, repeatedly and again at exit."""
    if "torch" in sys.modules or not gc.isenabled():  # called from another program: its garbage must not be frozen
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        from titan_moe.versions import REPORTS_LEAKS_AT_EXIT

        if REPORTS_LEAKS_AT_EXIT.is_here:
            atexit.register(gc.unfreeze)  # exit takes most of a second longer


def set_up_logging() -> None:
    """Show messages of rank 0, and warnings of other ranks and packages, on standard error."""
    rank, handler = int(os.environ.get("RANK", "0")), logging.StreamHandler(sys.stderr)
    handler.setFormatter(MessageFormat(sys.stderr, rank))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("titan_moe").setLevel(logging.WARNING if rank else logging.INFO)
