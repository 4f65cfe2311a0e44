"""JSON lines of `data.files` by file and line: blank lines and a byte order mark are no rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.config.train import DataConfig
from titan_moe.data import hub
from titan_moe.data.bad_rows import BadRowError, BadRows
from titan_moe.data.json_lines import files_of, find_bad_line, place_of_row


def make(folder: Path) -> DataConfig:
    (folder / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n\n{"text": "two"}\r\n')
    (folder / "b.jsonl").write_bytes(b' \n{"text": "three"}\n{"text": "fo')
    return DataConfig(source="datasets", path="json", files=f"{folder}/*.jsonl")


def test_places_of_earlier_versions_resume(tmp_path: Path) -> None:
    """They were [file, offset, lines] under another key."""
    data = make(tmp_path)
    texts = hub.open_stream(replace(data, bad_rows="skip"), BadRows("skip"), 2, {"json_lines": [0, 37, 3]})
    assert texts.read() == "three" and texts.num_read == 3
    assert texts.place() == {"rows": [1, 20, 2]}
    assert texts.read() is None and texts.num_read == 4


def test_column_of_lines_is_found_where_bad_ones_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "one"}\n{"content": 2}\n{"content": "three"}')
    data = DataConfig(source="datasets", path="json", files=f"{tmp_path}/a.jsonl", bad_rows="skip")
    bad_rows = BadRows("skip")
    assert list(hub.read_documents(data, bad_rows)) == ["one", "three"] and len(bad_rows) == 1
    texts = hub.open_stream(data, BadRows(), 0, None)
    texts.read()
    with pytest.raises(BadRowError, match=f"^data.files: {tmp_path}/a.jsonl, line 2, has int, not text"):
        texts.read()


def test_rows_have_a_file_and_a_line(tmp_path: Path) -> None:
    data = make(tmp_path)
    assert [place_of_row(data, row) for row in (2, 3, 9)] == [
        f"{tmp_path}/a.jsonl, line 3",
        f"{tmp_path}/b.jsonl, line 2",
        "",
    ]
    for num_read in (0, 3):
        assert find_bad_line(data, num_read).startswith(f"{tmp_path}/b.jsonl, line 3, is not JSON: Unterminated string")
    assert find_bad_line(data, 4) == ""


def test_files_that_are_one_value_have_no_lines(tmp_path: Path) -> None:
    data = make(tmp_path)
    assert len(files_of(data)) == 2
    (tmp_path / "c.json").write_text('{\n "text": "one"\n}')
    (tmp_path / "d.json").write_text('{"text": "one"}\n{"text": "two"}')
    others = {"*.json": 0, "d.json": 1}
    for pattern, count in others.items():
        assert len(files_of(DataConfig(path="json", files=f"{tmp_path}/{pattern}"))) == count
    assert files_of(DataConfig(path="parquet", files=data.files)) == []
