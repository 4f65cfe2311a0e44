"""Arrays of tables in recipes: `[[data.mixture]]`."""

import json
from pathlib import Path

import pytest

from titan_moe.config import RecipeError, load_recipe
from titan_moe.config.explain import explain
from titan_moe.config.mixture import MixtureSource
from titan_moe.config.parse import dump_recipe, recipe_of
from titan_moe.config.recipe import Recipe
from titan_moe.config.resume import compare, flatten

TABLES = """
[data]
source = "mixture"
[[data.mixture]]
path = "~/code/*.jsonl.gz"
weight = 3
[[data.mixture]]
path = "wiki.txt"
text_column = 'a "quoted" one'
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "tables.toml").write_text(TABLES)
    return load_recipe(tmp_path / "tables.toml")


def test_tables_are_read_and_written(recipe: Recipe, tmp_path: Path) -> None:
    assert recipe.data.mixture == (
        MixtureSource(path=f"{Path.home()}/code/*.jsonl.gz", weight=3.0),
        MixtureSource(path="wiki.txt", text_column='a "quoted" one'),
    )
    (tmp_path / "written.toml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "written.toml") == recipe
    saved = json.loads(json.dumps(flatten(recipe)))
    assert recipe_of(saved, "checkpoint") == recipe
    assert compare(saved, recipe).logged == []


def test_command_line_replaces_all_tables(tmp_path: Path) -> None:
    (tmp_path / "tables.toml").write_text(TABLES)
    recipe = load_recipe(tmp_path / "tables.toml", ['--data.mixture=[{path = "b.txt", weight = 0.5}]'])
    assert recipe.data.mixture == (MixtureSource("b.txt", 0.5),)
    before = flatten(load_recipe(tmp_path / "tables.toml"))
    (change,) = compare(before, recipe).logged
    assert change.startswith('data.mixture = [{ path = "b.txt", weight = 0.5 }] (was [{ path = "/')


@pytest.mark.parametrize(
    ("mixture", "words"),
    [
        ("a.txt", r'data.mixture = \["a.txt"\] must be a list of tables: a table \[\[data.mixture\]\] for each'),
        ("[{path = 1}]", r"data.mixture\[0\].path = 1 must be a string"),
        ('[{path = "a"}, {weight = "x"}]', r'data.mixture\[1\].weight = "x" must be a number'),
        (
            "[{wieght = 1}]",
            r"data.mixture\[0\].wieght is not a known key; the keys of \[\[data.mixture\]\] are path, w",
        ),
        ('[{source = "csv"}]', r'data.mixture\[0\].source = "csv" must be one of "auto"'),
    ],
)
def test_problems_name_the_table(tmp_path: Path, mixture: str, words: str) -> None:
    (tmp_path / "empty.toml").touch()
    with pytest.raises(RecipeError, match=words):
        load_recipe(tmp_path / "empty.toml", [f"--data.mixture={mixture}"])


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("data/code.jsonl.gz", "code"),
        ("data/code/*.txt", "code"),
        ("data/v1.2/**/*.parquet", "v1.2"),
        ("allenai/c4", "c4"),
        ("python-stdlib", "python-stdlib"),
        ("*.txt", ""),
    ],
)
def test_name_is_that_of_the_path(path: str, label: str) -> None:
    assert MixtureSource(path).label == label
    assert MixtureSource(path, name="own").label == "own"


def test_fields_of_a_table_are_explained() -> None:
    text = explain("data.mixture")
    assert "[[data.mixture]]" in text and "weight = 1.0\n    Its share of the sequences" in text
