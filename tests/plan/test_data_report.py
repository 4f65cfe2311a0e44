"""What `check` says of the data: its files, and how long the run is."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.config import Recipe
from titan_moe.config.chat import ChatConfig
from titan_moe.config.mixture import MixtureSource
from titan_moe.config.schema import Table
from titan_moe.plan.check_report import describe
from titan_moe.plan.cost.count import count_parameters
from titan_moe.plan.data_report import describe_data


def _lines(data: dict, train: dict | None = None, **validation: object) -> list[str]:
    recipe = Recipe()
    return list(
        describe_data(
            replace(
                recipe,
                data=replace(recipe.data, **data),
                train=replace(recipe.train, **(train or {})),
                validation=replace(recipe.validation, **validation),
            )
        )
    )


def test_length_is_told_in_tokens_and_tokens_a_parameter() -> None:
    count = count_parameters(Recipe().model)
    length, source = _lines({}, {"steps": 50})
    num_tokens = 50 * 8 * 256
    a_parameter = f"{num_tokens / count.total:.3g} a parameter ({num_tokens / count.active:.3g} an active one)"
    assert length == f"50 steps: 102,400 tokens, {a_parameter}"
    assert source == "synthetic: random ids without end"
    assert _lines({}, {"tokens": 102_400}) == _lines({}, {"steps": 50})
    assert _lines({}, {"epochs": 1.5})[0] == "1.5 epochs, whose steps and tokens a run counts at its start"
    assert "\ndata        100 steps: 204,800 tokens, " in describe(Recipe(), 1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"path": "HERE/*.txt"}, "text: 2 files of HERE/*.txt, 1.5 kB, some 1,502 tokens"),
        ({"path": "HERE/*.txt", "tokenizer": "HERE"}, "text: 2 files of HERE/*.txt, 1.5 kB"),
        ({"path": "HERE/a.jsonl", "is_streamed": True}, "json: 1 file of HERE/a.jsonl, 9 bytes, streamed"),
        ({"path": "HERE/a.bin", "holdout_fraction": 0.1}, "some 500 tokens; 0.1 of the documents held out"),
        ({"path": "owner/name"}, "datasets: owner/name"),
        ({"path": "python-stdlib", "source": "text"}, "text: python-stdlib"),
        ({"path": "json", "files": "HERE/a.jsonl", "source": "datasets"}, "datasets: 1 file of HERE/a.jsonl, 9 bytes"),
        ({"path": "gone/*.txt"}, "auto: gone/*.txt cannot be read here: data.path = 'gone/*.txt' matches no file"),
    ],
)
def test_files_are_listed(tmp_path: Path, data: dict, words: str) -> None:
    (tmp_path / "a.txt").write_text("a" * 1000)
    (tmp_path / "b.txt").write_text("b" * 500)
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "a.bin").write_bytes(bytes(1000))
    data = {"source": "auto", **data}
    here = {key: value.replace("HERE", str(tmp_path)) if type(value) is str else value for key, value in data.items()}
    assert words.replace("HERE", str(tmp_path)) in _lines(here)[1]


def test_what_a_run_would_refuse_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    data = {"source": "auto", "path": f"{tmp_path}/a.txt", "format": "chat", "tokenizer": f"{tmp_path}/none"}
    _, *lines = _lines({**data, "chat": ChatConfig(template="none.jinja")}, path=f"{tmp_path}/a.txt")
    has_none = f"text: {tmp_path}/a.txt has no conversations for data.format = 'chat', which are rows"
    assert lines == [
        has_none,
        f"tokenizer: data.tokenizer = '{tmp_path}/none' is no folder here",
        "template: data.chat.template = 'none.jinja' is no file here",
        f"validation: {has_none}",
    ]
    assert len(_lines({**data, "tokenizer": str(tmp_path), "chat": ChatConfig(template="plain")})) == 2


def test_data_of_validation_is_listed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 1000)
    lines = _lines({"source": "auto", "path": "x/y"}, path=f"{tmp_path}/a.txt", sets=Table(code="x/z"))
    assert lines[2] == f"validation: text: 1 file of {tmp_path}/a.txt, 1 kB, some 1,001 tokens"
    assert lines[3].startswith("validation code: datasets: x/z, a hub name")
    lines = _lines({"source": "auto", "path": "x/y"}, path="gone/a.txt", sets=Table(code="gone/b.txt"))
    assert "here: validation.path = 'gone/a.txt' is no file or folder here" in lines[2]
    assert "here: validation.sets.code = 'gone/b.txt' is no file or folder here" in lines[3]


def test_sources_of_a_mixture_are_listed_with_their_shares(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 1000)
    mixture = (MixtureSource(f"{tmp_path}/a.txt", 3.0), MixtureSource("owner/name"), MixtureSource("none.txt", 0))
    assert _lines({"source": "mixture", "mixture": mixture})[1:] == [
        f"a: share 0.75; text: 1 file of {tmp_path}/a.txt, 1 kB, some 1,001 tokens",
        "name: share 0.25; datasets: owner/name, a hub name: no file or folder of this name is here",
        "none: weight 0, not read",
    ]
    by_size = _lines({"source": "mixture", "mixture": mixture[1:2], "mixture_temperature": 2.0})
    assert by_size[1].startswith("name: a share of its tokens to the power of 0.5; datasets: owner/name, a hub name")
