"""Parts of files have each row once, and are read without the rows before."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.files_of_rows import write_rows

from titan_moe.data.lanes import cut as cut_module
from titan_moe.data.lanes.cut import Part, cut
from titan_moe.data.rows import Rows


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_module, "MIN_PART_BYTES", 1)


def _read(files: list[Path], kind: str, part: Part) -> Iterator[int]:
    rows = Rows(files, kind, part.start, end=part.end)
    while (row := rows.next()) is not None:
        yield row.value["number"]


@pytest.mark.parametrize(
    ("ending", "kind", "most"),
    [
        ("jsonl", "json", 40),
        ("json", "json", 2),
        ("jsonl.gz", "json", 2),
        ("parquet", "parquet", 12),
        ("arrow", "arrow", 2),
    ],
)
@pytest.mark.parametrize("num_parts", [1, 3, 8, 100])
def test_each_row_is_in_one_part(tmp_path: Path, ending: str, kind: str, most: int, num_parts: int) -> None:
    for name, numbers in {"a": range(37), "b": range(37, 80)}.items():
        write_rows(tmp_path / f"{name}.{ending}", [{"number": n, "text": "x" * (n * 7 % 50)} for n in numbers])
    files = sorted(tmp_path.iterdir())
    for start, first in (([0, 0, 0], 0), (_place_after(files, kind, 5), 5)):
        parts = cut(files, kind, start, num_parts)
        assert [number for part in parts for number in _read(files, kind, part)] == list(range(first, 80))
        assert min(num_parts, 2) <= len(parts) <= num_parts
        assert len(parts) >= min(num_parts, most) // 2


def test_a_small_file_is_no_part_of_its_own(tmp_path: Path) -> None:
    """It would be read as often as the large one."""
    for name, number in (("a", 400), ("b", 1), ("c", 0)):
        write_rows(tmp_path / f"{name}.jsonl.gz", [{"number": n, "text": str(n * 7919)} for n in range(number)])
    assert cut(sorted(tmp_path.iterdir()), "json", [0, 0, 0], 3) == [Part([0, 0, 0], None)]


def _place_after(files: list[Path], kind: str, num_rows: int) -> list[int]:
    rows = Rows(files, kind)
    for _ in range(num_rows):
        rows.next()
    return rows.place


def test_blank_lines_and_long_ones_are_in_one_part(tmp_path: Path) -> None:
    lines = [f'{{"number": {n}, "text": "{"x" * (3000 if n == 4 else 0)}"}}' for n in range(20)]
    (tmp_path / "a.jsonl").write_text("\n\n \n".join(lines) + "\n\n\n")
    files = [tmp_path / "a.jsonl"]
    parts = cut(files, "json", [0, 0, 0], 9)
    assert [number for part in parts for number in _read(files, "json", part)] == list(range(20))
    assert len(parts) > 1


def test_small_data_has_fewer_parts_and_unequal_ones_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(tmp_path / "a.jsonl", [{"number": n} for n in range(1000)])
    size = (tmp_path / "a.jsonl").stat().st_size
    monkeypatch.setattr(cut_module, "MIN_PART_BYTES", size // 3)
    files = [tmp_path / "a.jsonl"]
    assert len(cut(files, "json", [0, 0, 0], 256)) == 3
    assert "bytes" not in caplog.text
    zipped = [tmp_path / f"{name}.jsonl.gz" for name in "bcde"]
    monkeypatch.setattr(cut_module, "MIN_PART_BYTES", 1)
    for path, number in zip(zipped, (1000, 1000, 1000, 5500), strict=True):
        write_rows(path, [{"number": n} for n in range(number)])
    assert len(cut(zipped, "json", [0, 0, 0], 256)) == 4
    assert "a small one is read again before a large one has ended" in caplog.text
