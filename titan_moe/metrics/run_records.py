"""Read what a run has left in its folder: records and recipe. Does not import torch."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonpath
from pathlib import Path
from typing import Any

from titan_moe.config import RecipeError, load_recipe
from titan_moe.config.resume import flatten

RECORDS, RECIPE = "metrics.jsonl", "recipe.toml"
Record = dict[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """The records of a run."""

    name: str
    steps: list[Record]
    """Of logged training steps."""
    validations: list[Record]
    fields: Mapping[str, Any]
    """Of its recipe, by dotted key; empty where there is none."""


def read_runs(paths: Sequence[Path]) -> list[RunRecords]:
    """Read runs: their folders, or their metrics.jsonl. Each is called by the end of its path that tells it apart.

    Raises: RecipeError that names all that are none.
    """
    folders = [path.resolve().parent if path.is_file() else path.resolve() for path in paths]
    problems = [f"{path} {words}" for path, folder in zip(paths, folders, strict=True) if (words := _is_no_run(folder))]
    if problems:
        raise RecipeError(problems)
    return [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _is_no_run(folder: Path) -> str:
    if not folder.is_dir():
        return "does not exist"
    has_none = not any((folder / name).is_file() for name in (RECORDS, RECIPE))
    return f"is not the folder of a run: it has neither {RECORDS} nor {RECIPE}" if has_none else ""


def _names(folders: Sequence[Path]) -> list[str]:
    """The last names of folders, or all below the folder that they share, if some have the same one."""
    names = [folder.name for folder in folders]
    if len(set(names)) == len(set(folders)):
        return names
    shared = Path(commonpath(folders))
    shared = shared.parent if shared in folders else shared
    return [str(folder.relative_to(shared)) for folder in folders]


def _read(folder: Path, name: str) -> RunRecords:
    records = list(_records(folder / RECORDS))
    steps = [record for record in records if "loss" in record]
    return RunRecords(name, steps, [record for record in records if "validation_loss" in record], _fields(folder))


def _records(file: Path) -> Iterator[Record]:
    """All but lines that are none, such as a last one that is half written."""
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecipeError([f"{file} cannot be read: {error.strerror}"]) from error
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and type(record.get("step")) is int:
            yield record


def _fields(folder: Path) -> Mapping[str, Any]:
    """Of the recipe of a run, also of one that is no longer accepted."""
    file = folder / RECIPE
    if not file.is_file():
        return {}
    try:
        return flatten(load_recipe(file))
    except RecipeError:
        try:
            return dict(_flat(tomllib.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError):
            return {}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
