"""Whether a run may go on with other data than its checkpoint's: after a repair, or because the recipe says so."""

import json
import re
from contextlib import suppress
from pathlib import Path

from titan_moe.config.mixture import NOT_READ

_BETWEEN_SOURCES = re.compile(r"; (?=[\w.-]+: )")
BAD_DATA_FILE = "bad_data.json"
"""In the run folder of a run that bad data has ended: the fingerprint of this data, and what is bad in it."""


def record_bad_data(run_folder: Path, fingerprint: str, problem: str) -> None:
    """Note that the data of this fingerprint is to be repaired: checkpoints written with it accept other data.

    A checkpoint that is written with the repaired data has another fingerprint, and is held to it again.
    """
    (run_folder / BAD_DATA_FILE).write_text(json.dumps({"data": fingerprint, "problem": problem}, indent=1) + "\n")


def with_unread(data: str, other: str) -> str:
    """The fingerprint of data, in which each source of a mixture that is not read has the content of `other`."""
    if f": {NOT_READ}" not in data:
        return data
    contents = dict(source.partition(": ")[::2] for source in _BETWEEN_SOURCES.split(other))
    found = [source.partition(": ") for source in _BETWEEN_SOURCES.split(data)]
    return "; ".join(
        f"{name}: {contents.get(name, content) if content == NOT_READ else content}" for name, _, content in found
    )


def reason_to_accept(run_folder: Path, before: str, accepts_changed_data: bool) -> str:
    """Why a checkpoint with the fingerprint `before` goes on with other data; empty if it does not."""
    if accepts_changed_data:
        return "checkpoint.accept_changed_data = true"
    with suppress(OSError, ValueError, KeyError, TypeError):
        bad = json.loads((run_folder / BAD_DATA_FILE).read_text())
        if bad["data"] == before:
            return f"the run has ended because of it ({bad['problem']})"
    return ""
