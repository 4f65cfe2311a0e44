"""JSON lines by file and line: blank lines and a byte order mark are no rows, and any place resumes."""

from pathlib import Path

from titan_moe.config.train import DataConfig
from titan_moe.data.json_lines import Lines, files_of, find_bad_line, place_of_row


def make(folder: Path) -> DataConfig:
    (folder / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n\n{"text": "two"}\r\n')
    (folder / "b.jsonl").write_bytes(b' \n{"text": "three"}\n{"text": "fo')
    return DataConfig(source="datasets", path="json", files=f"{folder}/*.jsonl")


def test_lines_resume_at_any_place(tmp_path: Path) -> None:
    files = files_of(make(tmp_path))
    expected = [("a", 1), ("a", 3), ("b", 2), ("b", 3)]
    for read in range(5):
        before = Lines(files)
        for _ in range(read):
            before.next()
        lines, found = Lines(files, [before.num_file, before.offset, before.num_lines]), []
        while (line := lines.next()) is not None:
            found.append((line.file.stem, line.number))
        assert found == expected[read:]
    assert Lines(files).next().parse() == {"text": "one"}


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
