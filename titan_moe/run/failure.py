"""The message of a run's first failure: the rank that fails records it, and the launcher prints it last."""

import errno
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from titan_moe.config import RecipeError

EXIT_FAILED = 1
EXIT_BAD_RECIPE = 2
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file in which torchrun expects a rank's error."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WRITER_FAILED = ("inline_container.cc", "PytorchStreamWriter failed")
"""Part of the message of torch.save after an OSError of its file; the OSError itself is lost."""

MISSING_TOOLS = {
    "No working C++ compiler found": (
        "torch.compile needs a C++ compiler and finds none; install the package g++ (gcc-c++ on Fedora), name one in "
        'the environment variable CXX, or turn compilation off: compile.regional = "off"'
    ),
    "Failed to find C compiler": (
        "Triton needs a C compiler and finds none; install the package gcc, name one in the environment variable CC, "
        'or use no Triton: compile.regional = "off" and perf.kernels = "grouped_mm"'
    ),
    "Python.h: No such file": (
        "a compiler finds no Python.h; install the package python3-dev (python3-devel on Fedora), or turn compilation "
        'off: compile.regional = "off" (and perf.kernels = "grouped_mm" on a GPU)'
    ),
}
"""Part of the message of PyTorch or Triton -> what is missing on the machine."""


class ExitedByItself(SystemExit):
    """Other code, such as a user's class, has ended the process in the middle of a run. No exit code means failure."""

    def __init__(self, ended: SystemExit) -> None:
        self.exit_code = ended.code if isinstance(ended.code, int) and ended.code else EXIT_FAILED
        super().__init__(self.exit_code)
        frame = traceback.extract_tb(ended.__traceback__)[-1]
        self.words = f"its code has ended it by SystemExit({ended.code!r}) at {frame.filename}:{frame.lineno}"


class Failure(NamedTuple):
    """The recorded failure of a rank."""

    rank: int
    words: str
    exit_code: int
    time_s: float
    """When it was recorded, in seconds since the epoch."""


def record_failure(error: BaseException | str, folder: str = "") -> None:
    """Write the error of this rank into torchrun's error file, at once: cleaning up may take long, and makes other
    ranks fail. The first one stays. Without torchrun it does nothing."""
    path = os.environ.get(ERROR_FILE)
    is_the_end = isinstance(error, (KeyboardInterrupt, SystemExit)) and not isinstance(error, ExitedByItself)
    if not path or Path(path).exists() or is_the_end:
        return
    words = error if isinstance(error, str) else plain_words(error, folder) or f"{type(error).__name__}: {error}"
    stack = error if isinstance(error, str) else "".join(traceback.format_exception(error))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    record = {
        "message": {"message": words, "extraInfo": extra},
        "rank": int(os.environ.get("RANK", "0")),
        "exit_code": _exit_code(error),
    }
    unfinished = Path(f"{path}.{threading.get_ident()}")
    with suppress(OSError):
        try:
            unfinished.write_text(json.dumps(record))
            os.link(unfinished, path)  # whole, and only if there is none
        finally:
            unfinished.unlink(missing_ok=True)


def _exit_code(error: BaseException | str) -> int:
    if isinstance(error, ExitedByItself):
        return error.exit_code
    return EXIT_BAD_RECIPE if isinstance(error, RecipeError) else EXIT_FAILED


def first_rank_has_refused() -> bool:
    """Whether the first rank of this node has recorded an error of its recipe. Under torchrun each rank has a folder
    beside the others."""
    path = os.environ.get(ERROR_FILE, "")
    failures = recorded_failures(Path(path).parents[1] / "0") if path else []
    return any(failure.exit_code == EXIT_BAD_RECIPE for failure in failures)


def recorded_failures(folder: Path) -> list[Failure]:
    """The failures of all ranks below torchrun's log folder, the first one first."""
    failures = []
    for file in folder.rglob("error.json"):
        with suppress(OSError, ValueError, KeyError):  # a folder that is being removed; a file of torchrun's own
            record = json.loads(file.read_text())
            words = record["message"]["message"]
            failures.append(Failure(record["rank"], words, record["exit_code"], file.stat().st_mtime))
    return sorted(failures, key=lambda failure: failure.time_s)


def plain_words(error: BaseException, folder: str) -> str:
    """One sentence for an error that the recipe did not cause and a traceback does not explain; else an empty string.

    `folder` is the run folder.
    """
    if isinstance(error, RecipeError):
        return "; ".join(error.problems)
    if isinstance(error, ExitedByItself):
        return error.words
    way_out = "free some space and start the run again, which goes on from its newest complete checkpoint"
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            return f"the disk is full: {cause.filename or folder} cannot be written ({cause.strerror}); {way_out}"
        if isinstance(cause, RuntimeError) and any(words in str(cause) for words in WRITER_FAILED):
            return f"a checkpoint in {folder} cannot be written, the disk is probably full; {way_out}"
        if missing := next((words for part, words in MISSING_TOOLS.items() if part in str(cause)), ""):
            return missing
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and what it was raised from, on any rank."""
    todo, seen = [error], set()
    while todo:
        cause = todo.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        todo += [other for other in (cause.__cause__, cause.__context__) if other is not None]
        # of torch.distributed.checkpoint: rank -> (error, stack)
        todo += [failure[0] for failure in getattr(cause, "failures", {}).values() if isinstance(failure, tuple)]
