"""Which files of data there are, by their ending, and what a path of data names: files, a folder, a hub name.

Only names are read here, so that `titan-moe check` says the same as a run.
"""

import difflib
import glob
import os
import re
from pathlib import Path
from typing import NamedTuple

from titan_moe.config.data_splits import DICT_FILE, of_split

STANDARD_LIBRARY = "python-stdlib"
COMPRESSED = (".gz", ".zst")
"""Endings behind another one, of files that are decompressed as they are read."""
KINDS = {
    ".txt": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".bin": "tokens",
    ".npy": "tokens",
}
"""Ending -> kind of file. A new kind is a row here and a reader in data/rows.py."""
ROWS = ("json", "parquet", "arrow")
"""Kinds whose files have rows with columns."""
LINE_ENDINGS = (".jsonl", ".ndjson")
TABLES = {".csv": "csv", ".tsv": "csv"}
"""Ending -> the `data.path` with which `datasets` reads it."""
LISTED_ENDINGS = ".txt, .jsonl, .json, .parquet, .arrow, these with .gz or .zst, .bin and .npy"
SIDE_FILES = {"dataset_info.json", DICT_FILE, "state.json"}
"""What `datasets` writes beside its data in a folder."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_NAMED = 3


class Found(NamedTuple):
    """What a path of data names."""

    kind: str
    """`text`, one of ROWS, `tokens`, or `datasets` for a hub name."""
    files: list[Path]
    split: str = ""
    """The split of a folder that they are; empty if their names say none."""


def kind_of_name(name: str) -> str:
    """The kind of a file by its ending; empty for an unknown one."""
    return KINDS.get(ending_of(name).removesuffix(".gz").removesuffix(".zst"), "")


def ending_of(name: str) -> str:
    """The ending with that of a compression: `.jsonl.gz`."""
    stem, last = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] + last if last in COMPRESSED else last


def find(path: str, key: str, split: str = "train") -> Found:
    """Find what `path` of the recipe field `key` names: a file, a glob, a folder with files of one kind, or a hub name.
    Of a folder with several splits, the files of `split`.

    Files of a glob with unknown endings are text, as `**/*.py`; in a folder they are refused, since nothing names them.

    Raises: FileNotFoundError if nothing is there; ValueError for files of several kinds or of unknown ones.
    """
    if path == STANDARD_LIBRARY:
        return Found("text", [])
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        return _files_of_folder(folder, key, split)
    has_magic = glob.has_magic(path)
    if not has_magic and not folder.exists() and HUB_NAME.fullmatch(path) and not kind_of_name(path):
        return Found("datasets", [])
    files = find_files(path, key)
    if tables := [file for file in files if _table(file)]:
        way_out = f'set data.source = "datasets", data.path = "{_table(tables[0])}" and data.files = {path!r}'
        way_out = way_out if key == "data.path" else "write it as .jsonl or .parquet"
        raise ValueError(f"{key}: {tables[0]} is a table that `datasets` reads; {way_out}")
    kinds = _without_indexes({file: kind_of_name(file.name) for file in files})
    return Found(_one_kind({file: kind or "text" for file, kind in kinds.items()}, key, path), list(kinds))


def _table(file: Path) -> str:
    """The `data.path` with which `datasets` reads a file, also a compressed one; empty if none does."""
    return TABLES.get(ending_of(file.name).removesuffix(".gz").removesuffix(".zst"), "")


def find_files(pattern: str, key: str, names: str = "*.txt") -> list[Path]:
    """List the files of a glob, sorted. Errors name the recipe field `key`, and a glob that ends in `names`.

    Raises: FileNotFoundError if no file matches, ValueError if one may not be read.
    """
    matches = glob.glob(str(Path(pattern).expanduser()), recursive=True) if pattern else []
    files = sorted(path for path in map(Path, matches) if path.is_file())
    if not files and pattern and not matches and not glob.has_magic(pattern):
        raise FileNotFoundError(_no_such_file(pattern, key, names))
    if not files:
        is_folder = [Path(path).is_dir() for path in matches] == [True]
        found, folder = ("is a folder", pattern.rstrip("/")) if is_folder else ("matches no file", "corpus")
        raise FileNotFoundError(
            f"{key} = {pattern!r} {found} (working directory {Path.cwd()}); "
            f"give a glob such as '{folder}/**/{names}', where ** matches folders of any depth"
        )
    _check_readable(files, key)
    return files


def _no_such_file(path: str, key: str, names: str) -> str:
    """Say that a path that is no glob names nothing, and what is named alike."""
    parent = Path(path).expanduser().parent
    near = difflib.get_close_matches(Path(path).name, os.listdir(parent) if parent.is_dir() else [], n=_NAMED)
    found = f"give a file, a folder, or a glob such as 'corpus/**/{names}'"
    if near:
        found = f"named alike: {', '.join(str(parent / name) for name in near)}"
    elif not parent.is_dir():
        found = f"there is no folder {str(parent)!r}"
    return f"{key} = {path!r} is no file or folder here (working directory {Path.cwd()}); {found}"


def _files_of_folder(folder: Path, key: str, split: str) -> Found:
    """All files of a split below a folder, without hidden ones and the side files of `datasets`."""
    inside = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    inside = [name for name in inside if not any(part.startswith(".") for part in name.parts)]
    dicts = [name for name in inside if name.name == DICT_FILE]
    names = [name for name in inside if name.name not in SIDE_FILES]
    names, found = of_split(names, dicts, split, key, str(folder))
    kinds = {folder / name: kind_of_name(name.name) for name in names}
    kinds = _without_indexes(kinds)
    if not kinds:
        raise FileNotFoundError(f"{key} = {str(folder)!r} is a folder without files; give one with {LISTED_ENDINGS}")
    if unknown := [str(file) for file, kind in kinds.items() if not kind]:
        raise ValueError(
            f"{key} = {str(folder)!r} has files of unknown endings: {_named(unknown)}; the known ones are "
            f"{LISTED_ENDINGS}; remove the others, or give a glob such as '{folder}/**/*{_a_known_ending(kinds)}'"
        )
    _check_readable(list(kinds), key)
    return Found(_one_kind(kinds, key, str(folder)), list(kinds), found)


def _without_indexes(kinds: dict[Path, str]) -> dict[Path, str]:
    """Without Megatron's indexes of token files, which are found beside them."""
    return {file: kind for file, kind in kinds.items() if file.suffix != ".idx" or "tokens" not in kinds.values()}


def _one_kind(kinds: dict[Path, str], key: str, path: str) -> str:
    """The kind of all files.

    Raises: ValueError for several.
    """
    first = {kind: file for file, kind in reversed(kinds.items())}
    if len(first) > 1:
        examples = ", ".join(f"{kind} ({file})" for kind, file in sorted(first.items()))
        raise ValueError(f"{key} = {path!r} has files of several kinds: {examples}; give a glob with files of one kind")
    return next(iter(first))


def _check_readable(files: list[Path], key: str) -> None:
    for file in files:
        if not os.access(file, os.R_OK):
            raise ValueError(f"{key}: {file} cannot be read: permission denied; allow it, or leave it out of the glob")


def _a_known_ending(kinds: dict[Path, str]) -> str:
    return next((ending_of(file.name) for file, kind in kinds.items() if kind), ".txt")


def _named(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
