"""A process that may open few files."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def few_open_files(more: int) -> Iterator[None]:
    """Allow this process to open `more` files than are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = max(map(int, os.listdir("/proc/self/fd"))) + 1 + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
