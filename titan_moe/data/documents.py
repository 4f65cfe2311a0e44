"""The documents of a source, one after the other, whatever kind of files has them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_moe.config.data_files import Found, ending_of, find
from titan_moe.config.train import DataConfig
from titan_moe.data import hub
from titan_moe.data.bad_rows import BadRows
from titan_moe.data.cache import Cache
from titan_moe.data.row_text import Convert, RowTexts
from titan_moe.data.stream import Documents


def resolve(data: DataConfig) -> tuple[DataConfig, Found]:
    """What the source of `[data]` is. `auto` becomes what its path names.

    Raises: FileNotFoundError or ValueError if the path names nothing, or files of several kinds.
    """
    if data.source != "auto":
        return data, Found(data.source, [])
    found = find(data.path, "data.path", data.split)
    if found.kind != "tokens" and not data.tokenizer:
        raise ValueError(
            f"data.tokenizer = '' is for token ids, but data.path = {data.path!r} has {found.kind}; give 'bytes' or a "
            "folder with a tokenizer.json"
        )
    if data.format == "chat" and found.kind in ("text", "tokens"):
        raise ValueError(
            f"data.format = 'chat' reads conversations from rows, but data.path = {data.path!r} has files of "
            f"{found.kind}; give .jsonl, .json, .parquet or .arrow, or set data.format = 'text'"
        )
    if data.subset and found.kind != "datasets":
        raise ValueError(f"data.subset = {data.subset!r} is of a hub name, but data.path = {data.path!r} names files")
    if data.split not in (DataConfig.split, found.split) and found.kind != "datasets":
        raise ValueError(
            f"data.split = {data.split!r} is of a hub name or of a folder with splits, but data.path = {data.path!r} "
            f"names files{f' of the split {found.split!r}' * bool(found.split)}"
        )
    if data.is_streamed and found.kind in ("text", "tokens"):
        raise ValueError(
            f"data.is_streamed = true streams rows, but data.path = {data.path!r} has files of {found.kind}; set it to "
            "false"
        )
    return (replace(data, source="datasets") if found.kind == "datasets" else data), found


def open_documents(
    data: DataConfig,
    found: Found,
    bad_rows: BadRows,
    num_read: int,
    place: dict[str, Any] | None,
    convert: Convert | None = None,
) -> Documents:
    """A pass over the documents of rows, from document `num_read` on. `convert` makes them of rows, by default their
    text."""
    if found.kind == "datasets":
        return hub.open_stream(data, bad_rows, num_read, place, convert)
    return RowTexts(data, found.files, found.kind, bad_rows, num_read, place, convert)


def describe_rows(data: DataConfig, found: Found, cache: Cache) -> list[object]:
    """Make the cache key of rows."""
    if found.kind == "datasets":
        return hub.describe_dataset(data)
    return [found.kind, data.bad_rows, describe_content(found.files, cache)]


def describe_content(files: list[Path], cache: Cache) -> list[object]:
    """Make the cache key of files: their content, and the endings that decide how each is read, once if all have
    one."""
    endings = [ending_of(file.name) for file in files]
    return [cache.content_of(files), sorted(set(endings)) if len(set(endings)) == 1 else endings]
