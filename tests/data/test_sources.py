"""Sources of `[data]`: what `auto` reads, and how it goes on."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.files_of_rows import compressed, write_rows
from support.loaded_text import read_text

from titan_moe.config import Recipe
from titan_moe.data.loader import Loader

TEXTS = [f"row {number} " * (number % 5 + 1) for number in range(60)]


@pytest.fixture
def auto(make_recipe: Callable[..., Recipe]) -> Callable[..., Recipe]:
    def make(path: Path | str, validation: dict | None = None, **data: object) -> Recipe:
        fields = {"source": "auto", "path": str(path), "is_shuffled": False, **data}
        return make_recipe(data=fields, validation=validation or {})

    return make


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.parquet", "a.arrow.zst"])
def test_rows_of_files_are_documents(
    auto: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path, name: str, is_streamed: bool
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, texts in enumerate((TEXTS[:20], TEXTS[20:])):
        write_rows(folder / f"{number}-{name}", [{"content": text, "n": 1} for text in texts])
    loader = open_loader(auto(folder, is_streamed=is_streamed))
    assert read_text(loader, 5) == ("\0".join(TEXTS) + "\0")[: 5 * 8 * 16]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_stream_of_rows_resumes_on_another_number_of_ranks(
    auto: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path, name: str
) -> None:
    write_rows(tmp_path / f"0-{name}", [{"text": text} for text in TEXTS[:20]])
    write_rows(tmp_path / f"1-{name}", [{"text": text} for text in TEXTS[20:]])
    recipe = auto(tmp_path / f"*-{name}", {"every_steps": 1, "num_sequences": 4}, is_streamed=True)
    running, ahead = open_loader(recipe), open_loader(recipe)
    expected = [ahead.next_step().tokens_MBN.flatten(0, 1) for _ in range(16)]
    for step in range(0, 15, 3):
        state = json.loads(json.dumps(running.state_dict()))
        for rank in range(2):
            resumed = open_loader(recipe, rank, 2)
            resumed.load_state_dict(state)
            assert resumed.next_step().tokens_MBN.flatten(0, 1).equal(expected[step][rank * 4 : rank * 4 + 4])
        for later in range(3):
            assert running.next_step().tokens_MBN.flatten(0, 1).equal(expected[step + later])
    assert running.fingerprint() == open_loader(recipe).fingerprint()


def test_text_is_read_compressed_too_and_as_the_source_text_reads_it(
    auto: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("plain words " * 40)
    (tmp_path / "b.txt.gz").write_bytes(compressed(b"packed words " * 40, ".gz"))
    (tmp_path / "c.txt.zst").write_bytes(compressed(b"more words " * 40, ".zst"))
    loader = open_loader(auto(tmp_path / "*.txt*"))
    assert read_text(loader, 9) == f"{'plain words ' * 40}\0{'packed words ' * 40}\0{'more words ' * 40}\0"[: 9 * 128]
    assert open_loader(auto(tmp_path / "*.txt*", source="text")).fingerprint() == loader.fingerprint()


def test_token_files_are_read_by_their_ending(
    auto: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    ids = np.arange(240, dtype=np.uint16)
    ids.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", ids)
    for name in ("a.bin", "a.npy"):
        loader = open_loader(auto(tmp_path / name, tokenizer=""))
        assert loader.next_step().tokens_MBN.flatten().tolist() == list(range(128))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_rows_of_json_are_never_trained_on_as_text(
    auto: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path, name: str
) -> None:
    file = write_rows(tmp_path / name, [{"text": text} for text in TEXTS])
    rename = "rename it to .jsonl and " if name == "a.txt" else ""
    words = f'has JSON lines, not plain text: .*; {rename}set data.source = "auto", which reads a column'
    with pytest.raises(ValueError, match=f"data.path: {file} {words}"):
        open_loader(auto(file, source="text"))
    with pytest.raises(ValueError, match=f"data.files: {file} has JSON lines, not plain text; set data.path = .json."):
        open_loader(auto("text", source="datasets", files=str(file)))


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.jsonl", '{"text": "one"}', "JSON lines"),
        ("a.txt", '[\n {"text": "one"}]', "an array of JSON records"),
        ("a.txt", '{"text": "one"}', "JSON lines"),
        ("a.txt", '{"prompt": "a", "completion": "b"}', "JSON lines"),
        ("a.txt", '{"name": "one"}', ""),  # one line may be a text about JSON
        ("a.txt", '\ufeff{"a": "one"}\n{"a": "two"}', "JSON lines"),
        ("a.txt", '\ufeff[{"a": "one"}]', "an array of JSON records"),
        ("a.txt", 'cut"}\n{"a": "one"}\n{"a": "two"}', "JSON lines"),
        ("a.txt", '{"a": "one"}\n{"a": "tw\n{"a": "three"}', "JSON lines"),
        ("a.txt", 'Such as:\n{"a": "one"}\n{"a": "two"}\nor\nothers', ""),
        ("a.json", '{\n "text": "one",\n "b": {"c": 1}\n}', ""),
        ("a.txt", "{ this } is\n{ text }\n", ""),
        ("a.txt", "[{not: json}]", ""),
        ("a.jsonl", "", ""),
    ],
)
def test_content_tells_rows_of_json(
    auto: Callable[..., Recipe],
    open_loader: Callable[..., Loader],
    tmp_path: Path,
    name: str,
    content: str,
    rows: str,
) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "b.txt").write_text("text " * 40)
    recipe = auto(tmp_path / "*.*", source="text")
    if not rows:
        assert "text" in read_text(open_loader(recipe), 1)
        return
    with pytest.raises(ValueError, match=f"{name} has {rows}, not plain text"):
        open_loader(recipe)


def test_text_needs_a_tokenizer_also_where_its_folder_does_not_say_it(
    auto: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="data.tokenizer = '' is for token ids, but .* has text; give 'bytes'"):
        open_loader(auto(tmp_path, tokenizer=""))
    with pytest.raises(ValueError, match="data.subset = 'en' is of a hub name, but .* names files"):
        open_loader(auto(tmp_path, subset="en"))
    with pytest.raises(ValueError, match="data.split = 'test' is of a hub name or of a folder with splits, but data.p"):
        open_loader(auto(tmp_path, split="test"))


def test_text_and_token_files_are_not_streamed(
    auto: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="data.is_streamed = true streams rows, but .* files of text; set it to false"):
        open_loader(auto(tmp_path / "a.txt", is_streamed=True))


def test_hub_name_is_read_by_datasets(
    auto: Callable[..., Recipe],
    open_loader: Callable[..., Loader],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(*arguments: object, **options: object) -> object:
        asked.append((*arguments, options["split"]))
        rows = datasets.Dataset.from_list([{"id": 1, "story": text} for text in TEXTS])
        return rows.to_iterable_dataset() if options["streaming"] else rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    with caplog.at_level(logging.INFO):
        for is_streamed in (False, True):
            loader = open_loader(auto("owner/name", is_streamed=is_streamed))
            assert read_text(loader, 5) == ("\0".join(TEXTS) + "\0")[: 5 * 128]
    assert set(asked) == {("owner/name", None, "train")}
    assert "the text of data.path = 'owner/name' is in its column 'story'" in caplog.text
