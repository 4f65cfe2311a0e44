"""Documents from local text files: one file, one document."""

import glob
import sysconfig
from collections.abc import Iterator
from pathlib import Path

STANDARD_LIBRARY = "python-stdlib"
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


def find_text_files(path: str) -> list[Path]:
    """List the files that `data.path` means, sorted, so that every rank and every start sees the same documents.

    `python-stdlib` means the library sources of the running Python without their tests: text that is on every
    machine. It differs between Python releases, so losses on it are compared within one release only.

    Raises: FileNotFoundError where there is none.
    """
    files = _find_standard_library() if path == STANDARD_LIBRARY else find_files(path, "data.path")
    if not files:
        raise FileNotFoundError(
            f"data.path = {path!r} finds no sources in {sysconfig.get_path('stdlib')}: this Python keeps its library "
            "in an archive; name text files instead"
        )
    return files


def find_files(pattern: str, key: str) -> list[Path]:
    """List the files of a glob, sorted; `key` is the recipe field that an error names."""
    matches = glob.glob(str(Path(pattern).expanduser()), recursive=True) if pattern else []
    files = sorted(path for path in map(Path, matches) if path.is_file())
    if not files:
        raise FileNotFoundError(
            f"{key} = {pattern!r} matches no file (seen from {Path.cwd()}); "
            "give a glob such as 'corpus/**/*.txt', in which ** means any depth of folders"
        )
    return files


def read_documents(files: list[Path]) -> Iterator[str]:
    """Read file after file; bytes that are not UTF-8 become the replacement character."""
    for file in files:
        yield file.read_bytes().decode("utf-8", errors="replace")


def _find_standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    relative = (file.relative_to(root) for file in root.rglob("*.py"))
    kept = sorted(path.as_posix() for path in relative if _LEFT_OUT.isdisjoint(path.parts))
    return [root / path for path in kept]
