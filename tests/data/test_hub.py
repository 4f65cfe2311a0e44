"""Hugging Face `datasets`: local JSON lines, downloaded and streamed."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.loaded_text import read_text
from support.open_files import few_open_files

from titan_moe.config import Recipe
from titan_moe.data import hub
from titan_moe.data.loader import Loader

NUM_ROWS = 60


@pytest.fixture
def rows(tmp_path: Path) -> list[str]:
    texts = ["" if number % 9 == 4 else f"row {number} " * (number % 5 + 1) for number in range(NUM_ROWS)]
    for name, some in (("a", range(0, 23)), ("b", range(23, NUM_ROWS))):
        lines = [json.dumps({"text": texts[number], "number": number}) for number in some]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return texts


@pytest.fixture
def json_recipe(
    tmp_path: Path, rows: list[str], make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Recipe]:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # otherwise `datasets` sends usage counts

    def make(validation: dict | None = None, **data: object) -> Recipe:
        local = {"source": "datasets", "path": "json", "files": str(tmp_path / "*.jsonl")}
        return make_recipe(data={**local, **data}, validation=validation or {})

    return make


def test_datasets_downloaded_rows_are_documents(
    rows: list[str], json_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    loader = open_loader(json_recipe(is_shuffled=False))
    text = "\0".join(filter(None, rows)) + "\0"
    assert read_text(loader, 5) == text[: 5 * 8 * 16]
    assert loader.state_dict()["samples_per_epoch"] == (len(text) - 1) // 16


def test_datasets_cached_corpus_needs_no_datasets_package(
    json_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_loader(json_recipe()).next_step()
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert open_loader(json_recipe()).next_step().tokens_MBN.equal(first.tokens_MBN)


def test_datasets_streamed_rows_repeat_for_ever(
    rows: list[str], json_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    loader = open_loader(json_recipe(is_streamed=True))
    text = "\0".join(filter(None, rows)) + "\0"
    num_steps = 3 * len(text) // 128
    assert read_text(loader, num_steps) == (4 * text)[: num_steps * 128]


@pytest.mark.parametrize("has_places", [True, False])
def test_datasets_stream_resumes_on_another_number_of_ranks(
    json_recipe: Callable[..., Recipe],
    open_loader: Callable[..., Loader],
    monkeypatch: pytest.MonkeyPatch,
    has_places: bool,
) -> None:
    if not has_places:
        monkeypatch.setattr(hub.DocumentStream, "place", lambda self: None)
    recipe = json_recipe(is_streamed=True)
    running, ahead = open_loader(recipe), open_loader(recipe)
    expected = [ahead.next_step().tokens_MBN.flatten(0, 1) for _ in range(24)]
    for step in range(0, 20, 4):
        state = json.loads(json.dumps(running.state_dict()))
        assert (json.loads(state["stream"])["place"] is not None) == (has_places and step > 0)
        for rank in range(2):
            resumed = open_loader(recipe, rank, 2)
            resumed.load_state_dict(state)
            for later in range(2):
                mine = resumed.next_step().tokens_MBN.flatten(0, 1)
                assert mine.equal(expected[step + later][rank * 4 : rank * 4 + 4])
        for later in range(4):
            assert running.next_step().tokens_MBN.flatten(0, 1).equal(expected[step + later])


def test_datasets_stream_resumes_inside_one_document(
    json_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    texts = [f"row {number} " * (200 if number % 3 == 1 else 1) for number in range(12)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "b.jsonl").unlink()
    recipe = json_recipe(is_streamed=True)
    straight = open_loader(recipe)
    state = straight.state_dict()
    for _ in range(3 * sum(map(len, texts)) // (2 * 128)):
        resumed = open_loader(recipe)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.next_step().tokens_MBN.equal(straight.next_step().tokens_MBN)
        state = resumed.state_dict()


def test_datasets_stream_reserves_first_documents_for_validation(
    rows: list[str], json_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    loader = open_loader(json_recipe({"every_steps": 1, "num_sequences": 4}, is_streamed=True))
    held_out = "".join(map(chr, (t for b in loader.validation_batches() for t in b.tokens_MBN.flatten().tolist())))
    assert held_out == ("\0".join(filter(None, rows)) + "\0")[: 4 * 16]
    seen = read_text(loader, 20)
    used_rows = held_out.count("\0") + 1
    first_row = [row for row in rows if row][used_rows]
    assert seen.startswith(first_row)
    assert not any(f"row {number} " in seen for number in range(used_rows))


def test_datasets_stream_shorter_than_its_validation_is_refused(
    json_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    with pytest.raises(ValueError, match="validation.num_sequences = 150 .*use up all"):
        open_loader(json_recipe({"every_steps": 1, "num_sequences": 150}, is_streamed=True))
    with pytest.raises(ValueError, match="data.holdout_fraction = 0.1 .*stream"):
        open_loader(json_recipe(is_streamed=True, holdout_fraction=0.1))


@pytest.mark.parametrize("is_streamed", [True, False])
def test_datasets_column_must_exist_and_contain_text(
    json_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], is_streamed: bool
) -> None:
    with pytest.raises(ValueError, match="data.text_column = 'content' is not a column .*'text', 'number'"):
        open_loader(json_recipe(text_column="content", is_streamed=is_streamed)).next_step()
    with pytest.raises(ValueError, match="data.text_column = 'number' .*contains int"):
        open_loader(json_recipe(text_column="number", is_streamed=is_streamed)).next_step()


def test_datasets_load_error_names_the_recipe_field(
    json_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    with pytest.raises(ValueError, match="data.split = 'nothing'.*cannot load.*; give a name on the Hugging Face hub"):
        open_loader(json_recipe(split="nothing"))
    with pytest.raises(FileNotFoundError, match="data.files = 'nowhere/"):
        open_loader(json_recipe(files="nowhere/*.json"))
    with pytest.raises(ValueError, match="data.path is empty"):
        open_loader(json_recipe(path=""))


def test_datasets_missing_package_error_names_the_command(
    make_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        open_loader(make_recipe(data={"source": "datasets", "path": "owner/name"}))


def test_datasets_unreadable_row_error_names_the_file(
    json_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "good"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"data.files = '.*': the row after \d+ cannot be read: |cannot load this: "):
        open_loader(json_recipe(is_streamed=True, files=str(tmp_path / "b.jsonl"))).next_step()
    with pytest.raises(ValueError, match=r"data.files = '.*/b.jsonl': .*/b.jsonl, line 2, is not JSON: "):
        open_loader(json_recipe(files=str(tmp_path / "b.jsonl")))
    (tmp_path / "b.jsonl").write_text("")
    for is_streamed in (False, True):
        with pytest.raises(ValueError, match=r"data.files = '.*/b.jsonl': "):
            open_loader(json_recipe(is_streamed=is_streamed, files=str(tmp_path / "b.jsonl"))).next_step()


def test_datasets_of_pickles_are_refused(
    tmp_path: Path, json_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    (tmp_path / "a.pkl").write_bytes(b"cposix\nsystem\n(S'touch " + str(tmp_path / "made").encode() + b"'\ntR.")
    for is_streamed in (True, False):
        recipe = json_recipe(path="pandas", files=str(tmp_path / "a.pkl"), is_streamed=is_streamed)
        with pytest.raises(ValueError, match='data.path = "pandas" reads pickles, which can run code'):
            open_loader(recipe).next_step()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("is_streamed", [True, False])
def test_datasets_bad_rows_are_skipped_and_counted(
    rows: list[str],
    json_recipe: Callable[..., Recipe],
    open_loader: Callable[..., Loader],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_streamed: bool,
) -> None:
    """Lines that are cut, not UTF-8, nested too deeply, no object, or have no text; blank ones are no rows."""
    bad = [b'{"text": "ro', b'{"text": "\xe9"}', b"[" * 10**5, b'["text"]', b'{"text": 3}', b'{"number": 3}']
    for name in "ab":
        lines = (tmp_path / f"{name}.jsonl").read_bytes().split(b"\n")
        lines[20:20] = [b"", *bad, b" "]
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(lines))
    recipe = json_recipe(is_streamed=is_streamed, bad_rows="skip", is_shuffled=False)
    text = "\0".join(filter(None, rows)) + "\0"
    straight, state = open_loader(recipe), None
    for step in range(len(text) // 128):
        resumed = open_loader(recipe)
        resumed.load_state_dict(state or straight.state_dict())
        expected = text[step * 128 : step * 128 + 128]
        assert read_text(straight, 1) == read_text(resumed, 1) == expected
        state = json.loads(json.dumps(straight.state_dict()))
    if is_streamed:
        read_text(straight, 2 * len(text) // 128)
        assert len(straight.bad_rows) == 12, "each counts once, in all epochs"
    for line in range(22, 28):
        assert f"skipped a bad row: data.files: {tmp_path}/a.jsonl, line {line}, " in caplog.text


def test_datasets_bad_row_is_named_and_a_resume_may_skip_it(
    rows: list[str], json_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    lines = (tmp_path / "b.jsonl").read_text().split("\n")
    (tmp_path / "b.jsonl").write_text("\n".join([*lines[:30], '{"text": "cut', *lines[30:]]))
    loader = open_loader(json_recipe(is_streamed=True))
    seen = ""
    with pytest.raises(ValueError, match=rf"{tmp_path}/b.jsonl, line 31, is not JSON: .*data.bad_rows = .skip."):
        while True:
            seen += read_text(loader, 1)
    skipping = open_loader(json_recipe(is_streamed=True, bad_rows="skip"))
    skipping.load_state_dict(loader.state_dict())
    text = "\0".join(filter(None, rows)) + "\0"
    assert seen and seen + read_text(skipping, 3) == (2 * text)[: len(seen) + 3 * 128]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    back = open_loader(json_recipe(is_streamed=True))
    back.load_state_dict(skipping.state_dict())
    assert read_text(back, 1) == (2 * text)[len(seen) + 3 * 128 : len(seen) + 4 * 128]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b'{"text": "good"}\n' * 9 + '{"text": "caf\xe9"}\n'.encode("latin-1"),
            "b.jsonl, line 10, is not UTF-8: .* e9",
        ),
        ('{"text": "good"}\n'.encode("utf-16"), "b.jsonl is text in UTF-16, not json in UTF-8; convert it: iconv"),
        ('{"text": "good"}\n'.encode("utf-16-le"), "b.jsonl is not json in UTF-8: 17 of its first 34 bytes are 0"),
        (b"\x7fELF\x02" + bytes(range(256)), r"b.jsonl is a program \(ELF\), not json in UTF-8; leave it out"),
        (b"\x80\x81\x82" * 99, "b.jsonl, line 1, is not UTF-8: it has the bytes 80 at column 1; repair"),
    ],
)
def test_datasets_of_other_bytes_than_text_name_file_and_line(
    json_recipe: Callable[..., Recipe],
    open_loader: Callable[..., Loader],
    tmp_path: Path,
    is_streamed: bool,
    content: bytes,
    words: str,
) -> None:
    (tmp_path / "b.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        loader = open_loader(json_recipe(is_streamed=is_streamed, files=str(tmp_path / "b.jsonl")))
        read_text(loader, 2)


def test_datasets_removed_file_of_a_stream_is_named(
    json_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    loader = open_loader(json_recipe(is_streamed=True))
    loader.next_step()
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(ValueError, match=r"data.files = .*: .*/b.jsonl is gone while the run reads it, after row 23;"):
        read_text(loader, 20)


def test_datasets_path_of_a_file_says_where_it_belongs(
    json_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    file = tmp_path / "x.parquet"
    file.write_bytes(b"PAR1 a table PAR1")
    with pytest.raises(ValueError, match='is a file, .*: set data.source = "auto", which reads it'):
        open_loader(json_recipe(path=str(file), files=""))
    (tmp_path / "x.csv.gz").touch()
    with pytest.raises(ValueError, match="set data.path = 'csv' and data.files = '.*x.csv.gz'$"):
        open_loader(json_recipe(path=f"{tmp_path}/x.csv.gz", files=""))
    file.write_text("no table")
    with pytest.raises(ValueError, match="x.parquet is not a Parquet table; repair the file or leave it out"):
        open_loader(json_recipe(path="parquet", files=str(file)))


def test_datasets_fingerprint_of_many_files_keeps_few_open(tmp_path: Path, make_recipe: Callable[..., Recipe]) -> None:
    for number in range(300):
        (tmp_path / f"{number:03}.jsonl").write_text(f'{{"text": "{number}"}}')
    data = make_recipe(data={"source": "datasets", "path": "json", "files": str(tmp_path / "*.jsonl")}).data
    with few_open_files(60):
        assert "bytes as" in hub.fingerprint(data)


@pytest.mark.parametrize("num_sequences", [0, 2, 12])
@pytest.mark.parametrize("bad_rows", ["refuse", "skip"])
def test_files_of_a_streamed_dataset_are_lanes(
    json_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], num_sequences: int, bad_rows: str
) -> None:
    validation = {"every_steps": min(num_sequences, 1), "num_sequences": max(num_sequences, 1)}
    own = {"is_streamed": True, "stream_lanes": 4, "stream_has_worker": False, "bad_rows": bad_rows}
    loader = open_loader(json_recipe(validation, **own))
    sequences = [loader.next_step().tokens_MBN.flatten(0, 1).tolist() for _ in range(4)]
    text = "|".join("".join(map(chr, sequence)) for step in sequences for sequence in step)
    state = json.loads(json.dumps(loader.state_dict()))
    later = read_text(loader, 4)
    ranks = [open_loader(json_recipe(validation, **own), rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    steps = ["".join(read_text(rank, 1) for rank in ranks) for _ in range(4)]
    assert "".join(steps) == later
    batches = loader.validation_batches() if num_sequences else ()
    held_out = "".join(chr(token) for batch in batches for token in batch.tokens_MBN.flatten().tolist())
    seen = {number for number in range(NUM_ROWS) if f"row {number} " in text}
    reserved = {number for number in range(NUM_ROWS) if f"\0row {number} " in f"\0{held_out}"}
    assert reserved.isdisjoint(seen) and len(seen) > 10
