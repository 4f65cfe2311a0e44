"""Documents of text from rows: the column, and rows without text."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.files_of_rows import ALL_ENDINGS, write_rows

from titan_moe.config.data_files import kind_of_name
from titan_moe.config.train import DataConfig
from titan_moe.data.bad_rows import BadRowError, BadRows
from titan_moe.data.row_text import RowTexts, choose_column
from titan_moe.data.rows import columns_of

TEXTS = ["one", "", "two", "three"]


def _read(file: Path, bad_rows: BadRows | None = None, **data: str) -> list[str]:
    config = DataConfig(**data)
    texts = RowTexts(config, [file], kind_of_name(file.name), BadRows() if bad_rows is None else bad_rows, 0, None)
    return list(iter(texts.read, None))


@pytest.mark.parametrize("ending", ALL_ENDINGS)
def test_column_of_text_is_found_or_asked_for(tmp_path: Path, ending: str) -> None:
    rows = [{"id": str(number), "story": text or None, "n": number} for number, text in enumerate(TEXTS)]
    file = write_rows(tmp_path / f"a{ending}", rows)
    assert _read(file, text_column="story") == TEXTS
    with pytest.raises(ValueError, match="'text' is not a column of .*; its columns are 'id', 'story', 'n', and 2 of"):
        _read(file)
    with pytest.raises(ValueError, match="data.text_column = 'body' is not a column of .*'id', 'story', 'n'$"):
        _read(file, text_column="body")
    assert _read(write_rows(file, [{"n": 1, "story": text} for text in TEXTS])) == TEXTS
    assert _read(write_rows(file, [{"id": "a", "content": text} for text in TEXTS])) == TEXTS


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"text": "text", "content": "text", "c": "text"}, "text"),
        ({"text": "text", "messages": "records"}, "text"),
        ({"a": "text", "content": "text", "c": "text"}, "content"),
        ({"content": "text", "spans": "records"}, "content"),
        ({"content": "other", "c": "text"}, "c"),
        ({"text": "other", "c": "text"}, "text"),  # it is there, and its rows are refused by their type
    ],
)
def test_column_is_the_one_of_the_usual_names_or_the_only_one(columns: dict[str, Any], found: str) -> None:
    assert choose_column("text", columns, "a file") == found
    with pytest.raises(ValueError, match="columns are 'a', and none of them has strings: set data.text_column"):
        choose_column("text", {"a": "other"}, "a file")


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".arrow"])
@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"id": "a", "conversations": [{"from": "human"}]},
            """conversations in 'conversations': set data.format = "ch""",
        ),
        ({"id": "a", "messages": '[{"role": "user"}]'}, "conversations in 'messages'"),
        ({"prompt": "a", "completion": "b"}, "conversations in 'prompt' and 'completion'"),
        ({"version": "1.0", "data": [{"text": "a"}]}, "'data' has lists of objects: set data.text_column to"),
    ],
)
def test_names_of_conversations_and_of_lists_are_no_text(tmp_path: Path, ending: str, row: dict, words: str) -> None:
    file = write_rows(tmp_path / f"a{ending}", [row])
    with pytest.raises(ValueError, match=words):
        _read(file)
    assert _read(file, text_column=next(iter(row))) == [next(iter(row.values()))]


def test_column_that_the_first_row_lacks_is_found(tmp_path: Path) -> None:
    rows = [{"title": "a"}, {"title": "b", "text": None}, {"title": "c", "text": "d"}]
    assert columns_of(write_rows(tmp_path / "a.jsonl", rows), "json") == {"title": "text", "text": "text"}
    with pytest.raises(BadRowError, match="line 1, has no text in the column 'text'"):
        _read(tmp_path / "a.jsonl")
    assert _read(tmp_path / "a.jsonl", BadRows("skip")) == ["", "d"]


def test_pass_goes_on_at_any_document(tmp_path: Path) -> None:
    file, data = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]), DataConfig()
    for number in range(len(TEXTS) + 1):
        first = RowTexts(data, [file], "json", BadRows(), 0, None)
        assert [first.read() for _ in range(number)] == TEXTS[:number]
        for place in (json.loads(json.dumps(first.place())), None):
            again = RowTexts(data, [file], "json", BadRows(), first.num_read, place)
            assert list(iter(again.read, None)) == TEXTS[number:]


def test_bad_rows_are_named_or_skipped(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": 3}\n{"no": 3}\n["text"]\n{"text": "cut\n{"text": "two"}\n')
    with pytest.raises(
        BadRowError, match=f"data.path: {file}, line 2, has int, not text, in the column 'text'; .*skip"
    ):
        _read(file)
    bad_rows = BadRows("skip")
    assert _read(file, bad_rows) == ["one", "two"]
    assert len(bad_rows) == 4
