"""What a run says of its data and its length."""

from dataclasses import replace

import pytest

from titan_moe.config import Recipe
from titan_moe.data.sources import DataSize, SourceSize
from titan_moe.training.count_class import ModelCounts
from titan_moe.training.messages import log_data


def test_sources_and_a_run_within_its_warmup_are_told(caplog: pytest.LogCaptureFixture) -> None:
    recipe = Recipe()
    recipe = replace(recipe, train=replace(recipe.train, steps=20), optim=replace(recipe.optim, warmup_steps=20))
    sources = (SourceSize("a", None, 0.75, 0), SourceSize("b", 1000, 0.25, 80), SourceSize("c", None, 0.0, 0))
    counts = ModelCounts(1000, 500, 1.0)
    with caplog.at_level("INFO"):
        log_data(recipe, DataSize(sources=sources), 0, counts)
        assert caplog.messages[1:] == [
            "  a: streamed, share 0.75",
            "  b: 1,000 tokens, share 0.25, 0.5 epochs of this run",
            "  c: not read, share 0",
        ]
        caplog.clear()
        log_data(replace(recipe, train=replace(recipe.train, steps=19)), DataSize(), 0, counts)
    words = "train.steps = 19 end inside optim.warmup_steps = 20: optim.lr = 0.003 is not reached"
    assert caplog.messages[1:] == [words.replace("0.003", f"{recipe.optim.lr:g}")]
