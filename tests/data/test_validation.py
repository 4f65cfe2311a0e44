"""Validation with data of its own, in several sets by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.files_of_rows import write_rows

from titan_moe.config import Recipe
from titan_moe.config.schema import Table
from titan_moe.data.loader import Loader
from titan_moe.data.sources import open_for_evaluation

OWN = {"every_steps": 1, "num_sequences": 3}


@pytest.fixture
def make(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    (tmp_path / "train.txt").write_text("t" * 400)
    (tmp_path / "own.txt").write_text("o" * 100)
    (tmp_path / "code.py").write_text("c" * 40)
    write_rows(tmp_path / "rows.jsonl.gz", [{"content": "r" * 50}] * 2)

    def make_(validation: dict, **data: object) -> Recipe:
        data = {"source": "auto", "path": str(tmp_path / "train.txt"), **data}
        return make_recipe(data=data, validation=OWN | validation)

    return make_


def _text(loader: Loader, name: str) -> set[str]:
    labels = [batch.labels_MBN for batch in loader.validation_batches(name)]
    return set(map(chr, {int(label) for batch in labels for label in batch.flatten() if label > 0}))


def test_each_set_has_its_data_and_nothing_is_taken_from_training(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    sets = Table(code=f"{tmp_path}/*.py", rows=f"{tmp_path}/rows.jsonl.gz")
    loader = open_loader(make({"path": f"{tmp_path}/own.txt", "sets": sets}))
    assert loader.validation_names == ["", "code", "rows"]
    assert [_text(loader, name) for name in loader.validation_names] == [{"o"}, {"c"}, {"r"}]
    assert loader.state_dict()["samples_per_epoch"] == 400 // 16
    assert _text(loader, "code") == {"c"}, "again the same"


def test_split_of_validation_is_that_of_a_folder_with_splits(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    (tmp_path / "both").mkdir()
    for split in ("train", "validation", "test"):
        (tmp_path / "both" / f"{split}.txt").write_text(split[0] * 100)
    whole = {"path": f"{tmp_path}/both", "sets": Table(code=f"{tmp_path}/code.py")}
    for fields, letter in (({}, "v"), ({"split": "test"}, "t")):
        sets = Table() if fields else whole["sets"]  # a named split is of every path
        loader = open_loader(make({**whole, "sets": sets, **fields}, path=f"{tmp_path}/both"))
        assert _text(loader, "") == {letter}
        assert loader.state_dict()["samples_per_epoch"] == 100 // 16
    with pytest.raises(ValueError, match="^validation.split = 'test' is of a hub name .*, but validation.sets.code = "):
        open_loader(make({"sets": whole["sets"], "split": "test"}))


def test_sets_without_other_data_give_the_prompt(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    sets = Table(code=f"{tmp_path}/code.py", own=f"{tmp_path}/own.txt")
    loader = open_loader(make({"sets": sets}))
    assert loader.validation_names == ["code", "own"]
    assert loader.num_held_out == 40 // 16 + 100 // 16
    assert _text(loader, "") == {"c", "o"}
    assert loader.held_out_prompt(4).tolist() == [[ord("c")] * 4]


def test_sets_stand_beside_what_is_held_out(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    (tmp_path / "u.txt").write_text("h" * 100)
    recipe = make(
        {"sets": Table(code=f"{tmp_path}/code.py")}, path=f"{tmp_path}/[tu]*.txt", holdout_fraction=0.1, source="text"
    )
    loader = open_loader(recipe)
    assert [_text(loader, name) for name in loader.validation_names] == [{"h"}, {"c"}]


def test_stream_reserves_nothing_for_validation_with_data_of_its_own(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    stream = {"path": f"{tmp_path}/rows.jsonl.gz", "is_streamed": True}
    loader = open_loader(make({"path": f"{tmp_path}/own.txt"}, **stream))
    assert _text(loader, "") == {"o"}
    assert loader.next_step().tokens_MBN[0, 0].tolist() == [ord("r")] * 16
    assert "the first 0 documents held out" in loader.fingerprint()


def test_evaluation_of_a_stream_reads_the_stream(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    own = {"path": f"{tmp_path}/own.txt", "sets": Table(code=f"{tmp_path}/code.py")}
    for is_streamed in (True, False):
        recipe = make(own, path=f"{tmp_path}/rows.jsonl.gz", is_streamed=is_streamed)
        assert _text(open_loader(recipe, open_=open_for_evaluation), "") == {"r"}


def test_data_of_validation_is_opened_only_where_it_is_read(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    open_loader(make({"path": "nowhere.txt", "every_steps": 0}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"path": "nowhere.txt"}, "validation.path = 'nowhere.txt' is no file or folder here"),
        ({"sets": Table(code="nowhere.txt")}, "validation.sets.code = 'nowhere.txt' is no file or folder here"),
        ({"path": "HERE/short.txt"}, "validation.path gives 6 tokens, fewer than one sequence needs"),
        (
            {"path": "HERE/short.txt", "source": "datasets"},
            "validation.path = .* is a file, .*validation.source = .auto.",
        ),
        ({"path": "HERE/rows.jsonl.gz", "source": "text"}, "validation.path: .* has JSON lines, .*validation.source ="),
    ],
)
def test_problem_names_the_field_of_validation(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path, fields: dict, words: str
) -> None:
    (tmp_path / "short.txt").write_text("short")
    if "path" in fields:
        fields = {**fields, "path": fields["path"].replace("HERE", str(tmp_path))}
    with pytest.raises(ValueError, match=words):
        open_loader(make(fields))
