"""The fingerprint of data: of its content, wherever it lies, and cheap for large files."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from titan_moe.config import Recipe
from titan_moe.data.corpus import Corpus
from titan_moe.data.loader import Loader

Recipes = Callable[..., Recipe]
Loaders = Callable[..., Loader]


def corpus(*parts: Iterable[int], **changes: object) -> Corpus:
    arrays = [np.array(list(part), dtype="<u2") for part in parts]
    return Corpus(arrays, np.empty(0, dtype=np.int64), 2**16, **changes)  # type: ignore[arg-type]


def test_fingerprint_is_that_of_the_tokens() -> None:
    found = corpus(range(100)).fingerprint()
    assert found.startswith("100 tokens, sha256 of samples ")
    assert corpus(range(40), range(40, 100)).fingerprint() == found, "files may be cut elsewhere"
    others = [corpus(range(99)), corpus(range(1, 101)), corpus([*range(99), 98]), corpus(reversed(range(100)))]
    assert len({found, *(other.fingerprint() for other in others)}) == 5


@pytest.mark.parametrize("num_tokens", [3, 1 << 15, (1 << 15) + 1, 5 * (1 << 15) + 7])
def test_fingerprint_reads_every_token_of_a_small_corpus(num_tokens: int) -> None:
    ids = np.zeros(num_tokens, dtype="<u2")
    found = {Corpus([ids], ids, 2).fingerprint()}
    places = range(0, num_tokens, max(1, num_tokens // 40))
    for place in places:
        changed = ids.copy()
        changed[place] = 1
        found.add(Corpus([changed], ids, 2).fingerprint())
    assert len(found) == len(places) + 1


def test_fingerprint_of_a_large_corpus_reads_a_part() -> None:
    ids = np.lib.stride_tricks.as_strided(np.zeros(1, dtype="<u2"), (1 << 40,), (0,))  # 2 TiB that lie nowhere
    other = np.lib.stride_tricks.as_strided(np.ones(1, dtype="<u2"), (1 << 40,), (0,))
    assert Corpus([ids], ids, 2).fingerprint() != Corpus([other], ids, 2).fingerprint()


def test_fingerprint_of_text_is_that_of_all_tokens(make_recipe: Recipes, open_loader: Loaders, tmp_path: Path) -> None:
    def fingerprint(**texts: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, text in texts.items():
            (folder / f"{name}.txt").write_text(text)
            os.utime(folder / f"{name}.txt", (len(text), 1))
        return open_loader(make_recipe(data={"source": "text", "path": f"{folder}/*.txt"})).fingerprint()

    found = fingerprint(a="one " * 20, b="two " * 20)
    assert found.startswith("162 tokens, sha256 ") and "samples" not in found
    assert fingerprint(x="one " * 20, y="two " * 20) == found
    others = [
        fingerprint(a="two " * 20, b="one " * 20),
        fingerprint(a="one " * 20, b="twe " * 20),
        fingerprint(a="one " * 20 + "\N{REPLACEMENT CHARACTER}", b="two " * 20),
    ]
    assert len({found, *others}) == 4


def test_fingerprint_of_token_files_does_not_depend_on_their_place(
    make_recipe: Recipes, open_loader: Loaders, counting_tokens: Path, tmp_path: Path
) -> None:
    def fingerprint(path: Path, dtype: str = "uint16") -> str:
        data = {"source": "tokens", "path": str(path), "tokenizer": "", "token_dtype": dtype}
        return open_loader(make_recipe(data=data, model={"vocab_size": 2**31})).fingerprint()

    moved = tmp_path / "moved.bin"
    moved.write_bytes(counting_tokens.read_bytes())
    assert fingerprint(moved) == fingerprint(counting_tokens) != fingerprint(counting_tokens, "uint32")
    ids = np.fromfile(moved, dtype="<u2")
    ids[1234] += 1
    ids.tofile(moved)
    assert fingerprint(moved) != fingerprint(counting_tokens)


def test_fingerprint_of_synthetic_data(make_recipe: Recipes, open_loader: Loaders) -> None:
    found = open_loader(make_recipe()).fingerprint()
    assert found == open_loader(make_recipe()).fingerprint()
    assert found != open_loader(make_recipe(run={"seed": 1})).fingerprint()


def test_fingerprint_of_a_stream(make_recipe: Recipes, open_loader: Loaders, tmp_path: Path) -> None:
    pytest.importorskip("datasets")

    def fingerprint(name: str, word: str) -> str:
        (tmp_path / name).write_text("".join(f'{{"text": "{word} {number}"}}\n' for number in range(100)))
        data = {"source": "datasets", "path": "json", "files": str(tmp_path / name), "is_streamed": True}
        return open_loader(make_recipe(data=data)).fingerprint()

    assert fingerprint("a.jsonl", "same") == fingerprint("b.jsonl", "same") != fingerprint("b.jsonl", "diff")
