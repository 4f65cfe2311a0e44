"""What a path of data names: files by their ending, a folder, a hub name."""

from pathlib import Path

import pytest

from titan_moe.config.data_files import ending_of, find, kind_of_name


@pytest.mark.parametrize(
    ("name", "ending", "kind"),
    [
        ("a.txt", ".txt", "text"),
        ("a.JSONL", ".jsonl", "json"),
        ("a.b.json.gz", ".json.gz", "json"),
        ("a.parquet", ".parquet", "parquet"),
        ("a.arrow.zst", ".arrow.zst", "arrow"),
        ("a.npy", ".npy", "tokens"),
        ("a.csv.gz", ".csv.gz", ""),
        ("a.gz", ".gz", ""),
        ("README", "", ""),
    ],
)
def test_ending_tells_the_kind(name: str, ending: str, kind: str) -> None:
    assert (ending_of(name), kind_of_name(name)) == (ending, kind)


def _make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_folder_has_its_files_at_any_depth_without_hidden_ones_and_side_files(tmp_path: Path) -> None:
    _make(tmp_path, "b.arrow", "a/c.arrow", ".cache/x.txt", ".DS_Store", "state.json", "dataset_info.json")
    kind, files, _ = find(str(tmp_path), "data.path")
    assert (kind, [str(file.relative_to(tmp_path)) for file in files]) == ("arrow", ["a/c.arrow", "b.arrow"])
    assert find(f"{tmp_path}/*.arrow", "data.path").files == [tmp_path / "b.arrow"]
    assert find(f"{tmp_path}/b.arrow", "data.path").files == [tmp_path / "b.arrow"]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (
            (
                "dataset_dict.json",
                "train/data-00000-of-00001.arrow",
                "test/a.arrow",
                "test/state.json",
                "extra/b.arrow",
            ),
            {"train": [1], "test": [2], "extra": [4]},
        ),
        (("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"), {"train": [0], "test": [1]}),
        (("train_sft-00000-of-00001.parquet", "test-00000-of-00001.parquet"), {"train_sft": [0], "test": [1]}),
        (("train.jsonl", "valid.jsonl", "dev/a.jsonl"), {"train": [0], "validation": [1, 2]}),
        (("test-a.txt", "test.txt"), {"train": [0, 1], "test": [0, 1]}),  # one split alone is all there is
        (("train.txt", "tests.txt", "test.txt"), {"train": [0, 1, 2], "test": [0, 1, 2]}),
        (("wiki-00000-of-00001.parquet", "books-00000-of-00001.parquet"), {"train": [0, 1]}),
    ],
)
def test_folder_of_several_splits_has_the_files_of_one(tmp_path: Path, names: tuple[str, ...], splits: dict) -> None:
    _make(tmp_path, *names)
    for split, numbers in splits.items():
        files = find(str(tmp_path), "data.path", split).files
        assert sorted(files) == sorted(tmp_path / names[number] for number in numbers)


def test_folder_without_the_split_is_refused(tmp_path: Path) -> None:
    _make(tmp_path, "train_gen-00000-of-00001.parquet", "train_sft-00000-of-00001.parquet")
    with pytest.raises(ValueError, match="the splits train_gen, train_sft, and data.split = 'train'; set data.split"):
        find(str(tmp_path), "data.path")


def test_folder_of_token_files_has_their_indexes_too(tmp_path: Path) -> None:
    _make(tmp_path, "a.bin", "a.idx")
    for path in (str(tmp_path), f"{tmp_path}/*"):
        assert find(path, "data.path")[:2] == ("tokens", [tmp_path / "a.bin"])


def test_glob_of_other_endings_is_text_and_a_folder_with_them_is_refused(tmp_path: Path) -> None:
    _make(tmp_path, "a.py", "b.md")
    assert find(f"{tmp_path}/*.py", "data.path").kind == "text"
    _make(tmp_path, "c.jsonl.gz")
    with pytest.raises(
        ValueError, match=r"unknown endings: .*a.py, .*b.md; the known .* a glob such as .*\*.jsonl.gz'"
    ):
        find(str(tmp_path), "data.path")


def test_kinds_do_not_mix(tmp_path: Path) -> None:
    _make(tmp_path, "a.jsonl", "b.json.zst")
    assert find(str(tmp_path), "data.path").kind == "json"
    _make(tmp_path, "c.txt")
    for path in (tmp_path, tmp_path / "*"):
        with pytest.raises(
            ValueError, match=r"data.path = .* several kinds: json \(.*a.jsonl\), text \(.*c.txt\); give"
        ):
            find(str(path), "data.path")


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("nowhere/*.txt", FileNotFoundError, "matches no file"),
        ("nowhere/a.jsonl", FileNotFoundError, "is no file or folder here .*; there is no folder 'nowhere'$"),  # no hub
        ("HERE/y.csv", FileNotFoundError, "is no file or folder here .*; named alike: HERE/x.csv$"),
        ("", FileNotFoundError, "validation.path = '' matches no file"),
        ("HERE/empty", FileNotFoundError, "is a folder without files"),
        ("HERE/*.csv", ValueError, "x.csv is a table that `datasets` reads; write it as .jsonl or .parquet$"),
    ],
)
def test_path_that_names_nothing_to_read(tmp_path: Path, path: str, error: type[Exception], words: str) -> None:
    (tmp_path / "empty").mkdir()
    _make(tmp_path, "x.csv")
    with pytest.raises(error, match=words.replace("HERE", str(tmp_path))):
        find(path.replace("HERE", str(tmp_path)), "validation.path")


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.csv.gz", "x.TSV.zst"])
def test_table_is_read_by_datasets(tmp_path: Path, name: str) -> None:
    _make(tmp_path, name)
    way_out = f'{name} is a table .*data.source = "datasets", data.path = "csv" and data.files = '
    with pytest.raises(ValueError, match=way_out):
        find(f"{tmp_path}/{name}", "data.path")


def test_hub_name_is_no_folder_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find("owner/name", "data.path")[:2] == ("datasets", [])
    _make(tmp_path, "owner/name/a.jsonl")
    assert find("owner/name", "data.path")[:2] == ("json", [Path("owner/name/a.jsonl")])
    assert find("python-stdlib", "data.path")[:2] == ("text", [])
