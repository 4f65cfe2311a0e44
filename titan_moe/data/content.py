"""Know files of data by their content: the same data has the same key at another place, and after it was copied."""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

BLOCK_BYTES = 1 << 20
FOLDER = "content"
"""In the cache: for each list of files, with their sizes and times, the hash of their content."""
_LONG_BYTES = 10**10

logger = logging.getLogger(__name__)


def describe_files(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """List path, size and modification time of files. File contents are not read."""
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def content_of(files: Sequence[Path], cache_folder: Path, *, notes_it: bool) -> str:
    """A hash of the content of files, one after the other. Files whose paths, sizes and times are those of an earlier
    call are not read again; the process that `notes_it` writes the hash for later ones."""
    described = hashlib.sha256(json.dumps(describe_files(files)).encode()).hexdigest()
    note = cache_folder / FOLDER / described[:32]
    with suppress(OSError):
        if (found := note.read_text()) and len(found) == len(described):
            return found
    if (num_bytes := sum(file.stat().st_size for file in files)) > _LONG_BYTES:
        logger.info("reading %.3g GB once, to find tokens of the same data in the cache", num_bytes / 1e9)
    digest = _hash(files)
    if notes_it:
        with suppress(OSError):  # the cache says what is wrong with its folder
            note.parent.mkdir(parents=True, exist_ok=True)
            written = note.with_name(f"{note.name}.{uuid4().hex}.tmp")
            written.write_text(digest)
            os.replace(written, note)
    return digest


def _hash(files: Sequence[Path]) -> str:
    """Hash each file, and then the hashes: a byte that moves from one file to the next is a change."""
    digests = hashlib.sha256()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            digest = hashlib.sha256()
            while block := stream.read(BLOCK_BYTES):
                digest.update(block)
        digests.update(digest.digest())
    return digests.hexdigest()
