"""Rows of local files: every ending, any place, and what is none of it."""

import json
import sys
from pathlib import Path

import pytest
from support.files_of_rows import ALL_ENDINGS, compressed, write_rows

from titan_moe.config.data_files import kind_of_name
from titan_moe.data.rows import Rows, columns_of

ROWS = [{"text": f"naïve row {number}", "number": number} for number in range(23)]


def _read(rows: Rows) -> list[dict]:
    return [row.value for row in iter(rows.next, None)]


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("ending", ALL_ENDINGS)
def test_rows_of_every_ending_are_read_from_any_place(tmp_path: Path, ending: str, as_array: bool) -> None:
    files = [
        write_rows(tmp_path / f"{name}{ending}", some, as_array=as_array)
        for name, some in (("a", ROWS[:9]), ("b", ROWS[9:10]), ("c", ROWS[10:]))
    ]
    kind = kind_of_name(files[0].name)
    assert columns_of(files[0], kind) == {"text": "text", "number": "other"}
    rows, shares = Rows(files, kind), []
    for number in range(len(ROWS) + 1):
        shares.append(rows.share)
        assert _read(Rows(files, kind, json.loads(json.dumps(rows.place)))) == ROWS[number:]
        row = rows.next()
        assert (row is None) == (number == len(ROWS))
        assert row is None or (row.value, row.problem) == (ROWS[number], "")
    assert shares == sorted(shares) and shares[0] == 0 and rows.share == 1
    assert {row["text"] for row in _read(Rows(files, kind, column="text"))} == {row["text"] for row in ROWS}


def test_place_of_a_row_in_words(tmp_path: Path) -> None:
    lines = write_rows(tmp_path / "a.jsonl.gz", ROWS[:2])
    table = write_rows(tmp_path / "a.parquet", ROWS[:2])
    for file, kind, place in ((lines, "json", "line 2"), (table, "parquet", "row 2")):
        assert [row.place for row in iter(Rows([file], kind).next, None)][1] == f"{file}, {place}"


def test_bad_lines_are_rows_with_a_problem(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"a": 1}\n\n{"a": \n{"a": "\xe9"}\n' + b"[" * 10**5 + b'\n{"a": 2}'
    )
    rows = list(iter(Rows([tmp_path / "a.jsonl"], "json").next, None))
    assert [row.value for row in rows] == [{"a": 1}, None, None, None, {"a": 2}]
    words = ["", "is not JSON: Expecting", "is not JSON: 'utf-8'", "is not JSON: it is nested too deeply", ""]
    assert all(row.problem.startswith(start) for row, start in zip(rows, words, strict=True))


def _damaged(data: bytes) -> bytes:
    middle = len(data) // 3
    return data[:middle] + bytes(byte ^ 255 for byte in data[middle : middle + 40]) + data[middle + 40 :]


NUMBERS = b"".join(b'{"text": "%d"}\n' % (number**5) for number in range(500))
GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", compressed(GOOD, ".gz"), "is compressed by gzip, not JSON .*the ending of its compression too"),
        ("a.jsonl", GOOD.decode().encode("utf-16"), "is text in UTF-16, not JSON in UTF-8; convert it: iconv"),
        ("a.jsonl", GOOD.decode().encode("utf-16-le"), "is not JSON in UTF-8: 17 of its first 34 bytes are 0"),
        ("a.jsonl", b"PAR1 a table PAR1", "is a Parquet table, not JSON in UTF-8; give it the ending .parquet"),
        ("a.jsonl.gz", GOOD, "cannot be decompressed: Not a gzipped file.*or its ending is wrong"),
        ("a.jsonl.gz", compressed(GOOD * 99, ".gz")[:-20], "cannot be decompressed: .*it is damaged"),
        ("a.jsonl.gz", _damaged(compressed(NUMBERS, ".gz")), "cannot be decompressed: .*it is damaged"),
        ("a.jsonl.zst", _damaged(compressed(NUMBERS, ".zst")), "cannot be decompressed: "),
        ("a.jsonl.zst", GOOD, "cannot be decompressed: "),
        ("a.jsonl.zst", compressed(GOOD * 99, ".zst")[:-5], "cannot be decompressed: "),
        ("a.json", b'{\n "text": "good"\n}', r"is one object of JSON over several lines; give an array .*\[{...}"),
        ("a.json", b'[{"text": "good"},\n', "begins as an array of JSON and is none: .*of which a bad one can be"),
        ("a.parquet", GOOD, "is not a Parquet table: "),
        ("a.parquet", b"", "is not a Parquet table: "),
        ("a.parquet.gz", GOOD, "cannot be decompressed: "),
        ("a.arrow", GOOD, "is not an Arrow file: "),
    ],
)
def test_file_that_is_none_of_its_ending_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"data.path: {tmp_path}/{name} {words}"):
        _read(Rows([tmp_path / name], kind_of_name(name)))


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_table_that_is_damaged_inside_is_named(tmp_path: Path, ending: str) -> None:
    file = write_rows(tmp_path / f"a{ending}", [{"text": "x" * 50 + str(number)} for number in range(99)])
    data = file.read_bytes()
    file.write_bytes(data[:1500] + b"\xff" * 600 + data[2100:])
    with pytest.raises(ValueError, match=f"data.path: {file} (cannot be read after row|is not an? )"):
        _read(Rows([file], kind_of_name(file.name)))


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (".parquet", "a.parquet needs the package `pyarrow`: pip install pyarrow, or give the data as .jsonl"),
        (".arrow", "a.arrow needs the package `pyarrow`"),
        (".jsonl.zst", "a.jsonl.zst needs a library for zstd; pip install pyarrow"),
    ],
)
def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, words: str) -> None:
    file = write_rows(tmp_path / f"a{ending}", ROWS)
    for module in ("pyarrow", "pyarrow.parquet", "pyarrow.ipc", "compression"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=words):
        _read(Rows([file], kind_of_name(file.name)))
