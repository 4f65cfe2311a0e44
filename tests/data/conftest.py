"""Fixtures of the data tests: recipes and corpora small enough to check by hand."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_moe.config import Recipe
from titan_moe.data.loader import Loader, build_loader


@pytest.fixture
def make_recipe() -> Callable[..., Recipe]:
    """Make a recipe of 8 sequences of 16 tokens a step from overrides such as `data={"source": "text"}`. Streams are
    whole unless they have lanes."""

    def make(**sections: dict[str, Any]) -> Recipe:
        train = {"seq_len_tokens": 16, "global_batch_sequences": 8, "micro_batch_sequences": 2}
        sections = {**sections, "data": {"stream_lanes": 0, **sections.get("data", {})}}
        sections = {**sections, "train": {**train, **sections.get("train", {})}}
        recipe = Recipe()
        changed = {name: dataclasses.replace(getattr(recipe, name), **fields) for name, fields in sections.items()}
        return dataclasses.replace(recipe, **changed)

    return make


@pytest.fixture
def open_loader(tmp_path: Path) -> Callable[..., Loader]:
    """Open a loader in its own run folder, by default as the only rank."""

    def open_(recipe: Recipe, dp_rank: int = 0, dp_size: int = 1, **options: Any) -> Loader:
        return build_loader(recipe, dp_rank, dp_size, tmp_path / "run", barrier=lambda: None, **options)

    return open_


@pytest.fixture
def counting_tokens(tmp_path: Path) -> Path:
    """A file of the ids 0, 1, 2 ... 1999: with 16 tokens a sequence, sample i begins with token 16 * i."""
    path = tmp_path / "counting.bin"
    np.arange(2000, dtype="<u2").tofile(path)
    return path
