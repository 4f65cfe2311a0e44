"""The README keeps its word: its Python examples run, its files exist."""

import doctest
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_examples_run() -> None:
    results = doctest.testfile(str(README), module_relative=False)
    assert results.attempted >= 8
    assert results.failed == 0


def test_named_files_exist() -> None:
    text = README.read_text()
    named = set(re.findall(r"recipes/[\w/.]+\.toml|tools/\w+\.\w+|\]\(([\w/]+\.md)\)", text)) - {""}
    named |= {f"titan_moe/{path}" for path in re.findall(r"`((?:train|models|layers|kernels)/[\w/]+\.py)`", text)}
    assert len(named) >= 8
    missing = [name for name in named if not (README.parent / name).exists()]
    assert not missing


def test_files_named_in_readmes_of_rooms_exist() -> None:
    readmes = list((README.parent / "titan_moe").glob("*/README.md"))
    assert len(readmes) >= 2
    for readme in readmes:
        named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", readme.read_text()))
        places = (readme.parent, README.parent / "titan_moe", README.parent, *readme.parent.glob("*/"))
        assert len(named) >= 8
        assert not [name for name in named if not any((place / name).exists() for place in places)], readme
