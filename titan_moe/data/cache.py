"""A cache on disk for tokenised data, which runs share. One process of a node builds while the others wait; a killed
build never looks complete, and an entry with damage is built again."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from titan_moe.data.checked_file import CHECKSUMS, CheckedFile, DamagedFileError
from titan_moe.data.content import content_of
from titan_moe.data.making import LOCK_FILE, claimed

_FORMAT = 4  # increase it when the contents of an entry change
_READ_AT_START_BYTES = 1 << 30
"""Files up to this size are compared with their checksums at the start, in about a second; larger ones block by block,
when a rank first reads from a block."""

FOLDER = "token_cache"
"""Beside the run folders, which share it."""

Entry = TypeVar("Entry")

logger = logging.getLogger(__name__)


def folder_of(cache_folder: str, run_folder: str | Path) -> Path:
    """The folder of `data.cache_folder`; by default one beside the run folder, or inside it if that is not writable."""
    if cache_folder:
        return Path(cache_folder)
    run = Path(run_folder).absolute()
    existing = next(folder for folder in run.parents if folder.exists())
    return (run.parent if os.access(existing, os.W_OK) else run) / FOLDER


@dataclass(frozen=True)
class Cache:
    """A folder of entries. Each entry is a folder named by a hash of its inputs. An entry is built under a temporary
    name and then renamed, so an entry is either complete or absent."""

    folder: Path
    is_builder: bool
    """Whether this rank builds missing entries: one of each node. The other ranks read them after the barrier."""
    barrier: Callable[[], None]

    def get(self, name: str, key: object, build: Callable[[Path], None], open_: Callable[[Path], Entry]) -> Entry:
        """Open the entry of `key` (any JSON value). If it is missing or damaged, `build` fills a fresh folder for it.

        Raises: FileNotFoundError if the entry is missing after the barrier; ValueError if the folder cannot be created;
        the errors of `open_`.
        """
        digest = hashlib.sha256(json.dumps([_FORMAT, key], sort_keys=True).encode()).hexdigest()
        entry = self.folder / f"{name}-{digest[:16]}"
        try:
            if self.is_builder and not _is_whole(entry, open_):
                self._build(entry, build, open_)
        finally:
            self.barrier()  # also after a failure, or the other ranks would wait for ever
        if not entry.exists():
            raise FileNotFoundError(
                f"data.cache_folder: {entry} is missing on this host; all ranks of a host must share "
                "data.cache_folder. If the build failed, the error of another rank gives the reason"
            )
        return open_(entry)

    def content_of(self, files: Sequence[Path]) -> str:
        """A hash of the content of files, for a key. Ranks wait until one has read them; all call it equally often."""
        try:
            if self.is_builder:
                return content_of(files, self.folder, notes_it=True)
        finally:
            self.barrier()
        return content_of(files, self.folder, notes_it=False)

    def _build(self, entry: Path, build: Callable[[Path], None], open_: Callable[[Path], object]) -> None:
        """Build an entry that is missing or damaged, unless another process does."""
        with ExitStack() as claim:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                unfinished = claim.enter_context(claimed(entry))
            except OSError as error:
                problem = f"{error.filename} cannot be created: {error.strerror}; give a writable folder"
                raise ValueError(f"data.cache_folder: {problem}") from error
            if unfinished is not None and not _is_whole(entry, open_):
                logger.info("building %s", entry)
                is_replaced = entry.exists()
                build(unfinished)
                _put(unfinished, entry, is_replaced=is_replaced)
                return
        if not _is_whole(entry, open_):  # its maker has failed
            self._build(entry, build, open_)


def _put(unfinished: Path, entry: Path, *, is_replaced: bool) -> None:
    """Give a finished folder its name, in place of a damaged entry if there was one."""
    damaged = entry.with_name(f"{entry.name}.{uuid4().hex}.tmp")
    try:
        if is_replaced:
            with suppress(FileNotFoundError):  # another run has just replaced it too
                entry.rename(damaged)  # runs that have it open go on reading
        unfinished.rename(entry)
        (entry / LOCK_FILE).unlink(missing_ok=True)
    except OSError:
        if not entry.exists():  # otherwise another run has built the same entry meanwhile
            raise
    finally:
        for folder in (unfinished, damaged):
            shutil.rmtree(folder, ignore_errors=True)


def _is_whole(entry: Path, open_: Callable[[Path], object]) -> bool:
    if not entry.exists():
        return False
    try:
        for checksums in entry.glob(f"*{CHECKSUMS}"):
            file = CheckedFile(checksums.with_suffix(""))
            if file.num_bytes <= _READ_AT_START_BYTES:
                file.read_all()
        open_(entry)
    except DamagedFileError as error:
        logger.warning("%s; it is built again", error.problem)
        return False
    return True
