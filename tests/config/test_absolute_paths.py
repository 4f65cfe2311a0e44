"""Paths of a run's recipe, from any working directory."""

import dataclasses
from pathlib import Path

import pytest

from titan_moe.config import Recipe
from titan_moe.config.absolute_paths import with_absolute_paths
from titan_moe.config.chat import ChatConfig
from titan_moe.config.schema import Table


@pytest.mark.parametrize(
    ("section", "fields", "expected"),
    [
        ("data", {"source": "text", "path": "texts/*.txt"}, {"path": "HERE/texts/*.txt"}),
        ("data", {"source": "auto", "path": "texts"}, {"path": "HERE/texts"}),
        ("data", {"source": "auto", "path": "texts/../texts/a.txt"}, {"path": "HERE/texts/a.txt"}),
        ("data", {"source": "text", "path": "python-stdlib"}, {"path": "python-stdlib"}),
        ("data", {"source": "auto", "path": "owner/name"}, {"path": "owner/name"}),
        (
            "data",
            {"source": "datasets", "path": "texts", "files": "a*.json"},
            {"path": "texts", "files": "HERE/a*.json"},
        ),
        ("data", {"source": "synthetic", "path": "texts"}, {"path": "texts"}),
        ("data", {"source": "auto", "path": "/else/*"}, {"path": "/else/*"}),
        (
            "data",
            {"tokenizer": "texts", "cache_folder": "new"},
            {"tokenizer": "HERE/texts", "cache_folder": "HERE/new"},
        ),
        ("data", {"chat": ChatConfig("texts/a.txt")}, {"chat": ChatConfig("HERE/texts/a.txt")}),
        ("data", {"chat": ChatConfig("plain")}, {"chat": ChatConfig("plain")}),
        ("data", {"tokenizer": "bytes"}, {"tokenizer": "bytes", "cache_folder": ""}),
        ("validation", {"path": "texts"}, {"path": "HERE/texts"}),
        ("validation", {"sets": Table(a="texts/*", b="o/n")}, {"sets": {"a": "HERE/texts/*", "b": "o/n"}}),
        ("checkpoint", {"load_from": "hf:texts"}, {"load_from": "hf:HERE/texts"}),
        ("checkpoint", {"load_from": "texts/a.txt"}, {"load_from": "HERE/texts/a.txt"}),
        ("checkpoint", {"load_from": "gone"}, {"load_from": "gone"}),  # an error names it as it was given
        ("checkpoint", {}, {"load_from": ""}),
    ],
)
def test_paths_become_absolute_and_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, fields: dict, expected: dict
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "plain").write_text("")
    recipe = Recipe()
    given = dataclasses.replace(recipe, **{section: dataclasses.replace(getattr(recipe, section), **fields)})
    absolute = with_absolute_paths(given)
    values = {name: getattr(getattr(absolute, section), name) for name in expected}
    assert str(values).replace(str(tmp_path), "HERE") == str(expected)
    monkeypatch.chdir("/")
    assert with_absolute_paths(absolute) == absolute
