"""Cut the rows of files into parts of nearly equal size, each of which is read without the rows before it."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from titan_moe.config.data_files import ending_of
from titan_moe.data.rows import has_lines, row_groups

MIN_PART_BYTES = 1 << 20
"""Smaller parts would be read again and again, while larger documents are read once."""
_MOST_UNEQUAL = 4

logger = logging.getLogger(__name__)

Place = list[int]
"""As of `Rows`: the number of a file, and where a row begins in it."""


class Part(NamedTuple):
    """The rows from a place on, up to another one or the end of the last file."""

    start: Place
    end: Place | None


def cut(files: Sequence[Path], kind: str, start: Place, num_parts: int) -> list[Part]:
    """Cut what follows `start` into at most so many parts: JSON lines between lines, Parquet between row groups, other
    and compressed files between files. Only sizes, some lines and headers are read, so that every rank finds the same.
    """
    sizes = [file.stat().st_size for file in files]
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    first = _bytes_before(files, kind, sizes, start)
    num_parts = max(min(num_parts, (ends[-1] - first) // MIN_PART_BYTES), 1)
    cuts: dict[tuple[int, ...], int] = {}
    for part in range(1, num_parts):
        target = first + (ends[-1] - first) * part // num_parts
        number = next(number for number, end in enumerate(ends) if target < end)
        place, at = _next_place(files[number], kind, number, target - (ends[number] - sizes[number]), sizes[number])
        if place[:2] > start[:2] and place[0] < len(files):
            cuts[tuple(place)] = at + ends[number] - sizes[number]
    cuts = _apart(cuts, first, ends[-1])
    starts = [start, *map(list, sorted(cuts))]
    bounds = [first, *(cuts[tuple(place)] for place in starts[1:]), ends[-1]]
    lengths = [max(end - begin, 1) for begin, end in zip(bounds, bounds[1:], strict=False)]
    if max(lengths) > _MOST_UNEQUAL * min(lengths):
        words = "%d lanes have parts of %s to %s bytes: a small one is read again before a large one has ended"
        logger.warning(words, len(starts), f"{min(lengths):,}", f"{max(lengths):,}")
    return [Part(begin, end) for begin, end in zip(starts, [*starts[1:], None], strict=True)]


def _apart(cuts: dict[tuple[int, ...], int], first: int, last: int) -> dict[tuple[int, ...], int]:
    """The cuts that leave no part too small: it would be read again and again, and so be a large share of all."""
    least = max(MIN_PART_BYTES // 2, (last - first) // (len(cuts) + 1) // _MOST_UNEQUAL)
    kept: dict[tuple[int, ...], int] = {}
    before = first
    for place, at in sorted(cuts.items()):
        if at - before >= least and last - at >= least:
            kept[place] = before = at
    return kept


def _is_by_bytes(file: Path, kind: str) -> bool:
    return kind == "json" and not ending_of(file.name).endswith((".gz", ".zst")) and has_lines(file)


def _bytes_before(files: Sequence[Path], kind: str, sizes: list[int], place: Place) -> int:
    """Bytes before a place; of a file that is not cut by bytes those of the files before."""
    number, offset, *_ = place
    is_inside = number < len(files) and _is_by_bytes(files[number], kind)
    return sum(sizes[:number]) + (offset if is_inside else 0)


def _next_place(file: Path, kind: str, number: int, offset: int, size: int) -> tuple[Place, int]:
    """The first place at or behind a byte of a file where reading can begin, and its byte."""
    behind = [number + 1, 0, 0], size
    if offset == 0:
        return [number, 0, 0], 0
    if _is_by_bytes(file, kind):
        with file.open("rb") as opened:
            opened.seek(offset)
            while (line := opened.readline()) and not line.strip():
                pass  # blank lines belong to the part before, whose reader skips them
            found = opened.tell()
        return ([number, found, -1], found) if found < size else behind
    if kind == "parquet" and not ending_of(file.name).endswith((".gz", ".zst")):
        firsts, total = row_groups(file)
        row = next((first for first in firsts if first * size >= offset * total), total)
        return ([number, row, row], row * size // total) if row < total else behind
    return behind
