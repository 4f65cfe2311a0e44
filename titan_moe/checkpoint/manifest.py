"""The manifest of a checkpoint: what wrote it, and a hash of every file, so that a changed bit is found by name.

The hash is SHA-256: processors have instructions for it, hashlib releases the interpreter lock, and `sha256sum` reads
it. CRC-32 is hardly faster in zlib, and says less.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titan_moe.config.regular_file import open_regular

MANIFEST_FILE = "manifest.json"
FORMAT = 1
"""Increase it when an older version could not read, or would misread, a checkpoint."""


@dataclass(frozen=True)
class FileHash:
    """Size and hash of a file, as it was written."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The description of one checkpoint."""

    recipe: dict[str, Any]
    """All fields of the run's recipe by dotted key."""
    data: str
    """Fingerprint of the run's data."""
    files: dict[str, FileHash]
    """All other files of the checkpoint by name."""
    validation_loss: float | None = None
    """Of its weights, if there was a validation at its step; finite."""
    base: str = ""
    """Fingerprint of the weights that have what this checkpoint leaves out (`checkpoint.saves_frozen`)."""

    def write(self, folder: Path) -> None:
        """Write the manifest atomically: it is complete or absent."""
        unfinished = folder / f"{MANIFEST_FILE}.tmp"
        with unfinished.open("wb") as file:
            file.write(_seal({"format": FORMAT, **asdict(self)}))
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(folder / MANIFEST_FILE)


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a checkpoint; None if it has none, because it was written before there were any.

    Raises: ValueError for a damaged one, one of a later format, or one that points outside of its folder; OSError if it
    cannot be read.
    """
    file = folder / MANIFEST_FILE
    if not file.exists():
        return None
    with open_regular(file) as stream:
        contents = _unseal(stream.read())
    if contents.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST_FILE} has the format {contents.get('format')}, but this version reads {FORMAT}")
    try:
        files = {name: FileHash(**file) for name, file in contents["files"].items()}
        loss, base = contents.get("validation_loss"), str(contents.get("base", ""))  # earlier versions have neither
        loss = None if loss is None else float(loss)
        manifest = Manifest(dict(contents["recipe"]), contents["data"], files, loss, base)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{MANIFEST_FILE} lacks a part") from error
    if outside := [name for name in files if Path(name).name != name]:
        raise ValueError(f"{MANIFEST_FILE} points to {outside[0]}, outside of the checkpoint")
    return manifest


def find_damage(folder: Path, files: Iterable[tuple[str, FileHash]]) -> list[str]:
    """Read files of a checkpoint completely, in threads, and describe each that is not as it was written."""
    with ThreadPoolExecutor() as pool:
        return list(filter(None, pool.map(lambda file: _damage(folder / file[0], file[1]), files)))


def _damage(file: Path, written: FileHash) -> str:
    try:
        with open_regular(file) as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
            if num_bytes != written.num_bytes:
                return f"{file.name} has {num_bytes:,} bytes instead of {written.num_bytes:,}"
            if hashlib.file_digest(stream, "sha256").hexdigest() == written.sha256:
                return ""
            return f"{file.name} is not as it was written, its sha256 differs"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"


def _seal(contents: dict[str, Any]) -> bytes:
    """Format as JSON, with the hash of the text without it as the last entry."""
    own = hashlib.sha256(_to_text(contents)).hexdigest()
    return _to_text({**contents, "sha256": own})


def _unseal(data: bytes) -> dict[str, Any]:
    """Undo `_seal`.

    Raises: ValueError if any byte differs from what was sealed.
    """
    try:
        contents = json.loads(data)
        del contents["sha256"]
        is_whole = _seal(contents) == data
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"{MANIFEST_FILE} is not as it was written")
    return contents


def _to_text(contents: dict[str, Any]) -> bytes:
    return json.dumps(contents, indent=1).encode() + b"\n"
