"""Documents from local text files, one document per file."""

import glob
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

STANDARD_LIBRARY = "python-stdlib"
_EXCLUDED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


def find_text_files(path: str) -> list[Path]:
    """List the files of `data.path`, sorted, so that all ranks and all restarts read the same documents.

    `python-stdlib` stands for the standard library sources of the running Python, without their tests. They exist on
    every machine but differ between Python releases, so losses are comparable only within one release.

    Raises: FileNotFoundError if no file matches.
    """
    if path != STANDARD_LIBRARY:
        return find_files(path, "data.path")
    root = Path(sysconfig.get_path("stdlib"))
    relative = (file.relative_to(root) for file in root.rglob("*.py"))
    kept = sorted(path.as_posix() for path in relative if _EXCLUDED.isdisjoint(path.parts))
    if not kept:
        raise FileNotFoundError(
            f"data.path = {path!r} finds no sources in {root}: this Python has its library in an archive; give text "
            "files instead"
        )
    return [root / path for path in kept]


def find_files(pattern: str, key: str, names: str = "*.txt") -> list[Path]:
    """List the files of a glob, sorted. Errors name the recipe field `key`, and a glob that ends in `names`.

    Raises: FileNotFoundError if no file matches, ValueError if one may not be read.
    """
    matches = glob.glob(str(Path(pattern).expanduser()), recursive=True) if pattern else []
    files = sorted(path for path in map(Path, matches) if path.is_file())
    if not files:
        is_folder = [Path(path).is_dir() for path in matches] == [True]
        found, folder = ("is a folder", pattern.rstrip("/")) if is_folder else ("matches no file", "corpus")
        raise FileNotFoundError(
            f"{key} = {pattern!r} {found} (working directory {Path.cwd()}); "
            f"give a glob such as '{folder}/**/{names}', where ** matches folders of any depth"
        )
    for file in files:
        if not os.access(file, os.R_OK):
            raise ValueError(f"{key}: {file} cannot be read: permission denied; allow it, or leave it out of the glob")
    return files


def read_documents(files: list[Path]) -> Iterator[str]:
    """Yield the text of each file. Bytes that are not UTF-8 become the replacement character."""
    for file in files:
        yield file.read_bytes().decode("utf-8", errors="replace")
