"""The README keeps its word: its Python examples run, its files exist."""

import doctest
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
OF_LAYERS = README.parent / "titan_moe" / "layers" / "README.md"
READMES = [README, *(README.parent / "recipes").glob("*.md"), *(README.parent / "titan_moe").rglob("README.md")]
READMES += (README.parent / "tests").glob("*.md")
MOST_BYTES = 9_000
"""Of the README of the project: it is for a reader who has a minute."""


def test_examples_run() -> None:
    for readme, least in ((README, 3), (OF_LAYERS, 8)):
        results = doctest.testfile(str(readme), module_relative=False)
        assert results.attempted >= least
        assert results.failed == 0


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.read_bytes()) <= MOST_BYTES
    for readme in READMES:
        for path, _, heading in re.findall(r"\]\(([\w/.]+)(#([\w-]+))?\)", readme.read_text()):
            target = readme.parent / path
            assert target.exists(), (readme, path)
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if heading else []
            names = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert not heading or heading in names, (readme, path, heading)


def test_named_files_exist() -> None:
    text = "\n".join(readme.read_text() for readme in READMES)
    named = set(re.findall(r"recipes/[\w/]+\.toml|tools/[\w/]+\.\w+", text))
    rooms = "|".join(path.name for path in (README.parent / "titan_moe").iterdir() if path.is_dir())
    named |= {f"titan_moe/{path}" for path in re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", text)}
    assert len(named) >= 8
    missing = [name for name in named if not (README.parent / name).exists()]
    assert not missing


def test_files_named_in_readmes_of_rooms_exist() -> None:
    for readme in (README.parent / "titan_moe").rglob("README.md"):
        named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", readme.read_text()))
        places = (readme.parent, README.parent / "titan_moe", README.parent, *readme.parent.glob("*/"))
        assert not [name for name in named if not any((place / name).exists() for place in places)], readme
