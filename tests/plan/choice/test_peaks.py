"""Peaks that are asked for many times are those of the recipes themselves."""

from pathlib import Path

import pytest

from titan_moe.config import load_recipe
from titan_moe.config.recompute import of_entries, with_entries
from titan_moe.plan.choice.peaks import GROWN_FACTOR, Peaks
from titan_moe.plan.cost.peak import peak_bytes
from titan_moe.plan.pipeline.parts import parts_of
from titan_moe.plan.resolved import Resolved

RECIPES = Path(__file__).parents[3] / "recipes"
LAYOUTS = {
    "alone": (),
    "1f1b": ("--parallel.pp=8", "--parallel.ep=4"),
    "zbv": ("--parallel.pp=4", "--parallel.vpp=2", "--parallel.pp_schedule=zbv", "--compile.cudagraph=off"),
}
ENTRIES = (
    (),
    ("block",),
    ("norms", "experts:-9", "expert_weights"),
    ("norms:7-30", "moe_act:0-3", "experts:5-11", "attention"),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_peaks_are_those_of_the_recipe(layout: str) -> None:
    recipe = with_entries(load_recipe(RECIPES / "qwen3_30b_a3b.toml", list(LAYOUTS[layout])), ())
    peaks = Peaks(recipe, 32)
    for entries in (*ENTRIES, *ENTRIES):
        one = Resolved(with_entries(recipe, entries), 32)
        parts = parts_of(one.recipe, 32)
        expected = [(peak_bytes(part, GROWN_FACTOR, one.experts) + one.outside_bytes) / 2**30 for part in parts]
        assert peaks.gib(of_entries(entries, recipe.model.num_blocks)) == expected
    ends = Peaks(recipe, 32, (0,)).gib(of_entries(ENTRIES[-1], recipe.model.num_blocks))
    assert ends == expected[:1]
