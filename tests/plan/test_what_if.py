"""What a layout would be with one thing changed: each case passes the rules or names the one that it breaks."""

import json
from pathlib import Path

import pytest

from titan_moe.config import RecipeError, check_rules, load_recipe
from titan_moe.config.parallel import planning
from titan_moe.entry import plan
from titan_moe.plan.what_if import Case, changed_parts, describe_what_if, what_if

RECIPE = Path(__file__).parents[2] / "recipes" / "qwen3_30b_a3b.toml"
SMALL = ["--model.num_layers=4", "--train.global_batch_sequences=32"]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    with planning():
        return what_if(load_recipe(RECIPE, [*SMALL, "--parallel.ep=2"]), 4, "H100")


def test_each_case_passes_the_rules_or_is_refused(cases: list[Case]) -> None:
    assert len({case.name for case in cases}) == len(cases)
    with planning():
        for case in cases:
            assert bool(case.refusal) == (case.prediction is None)
            assert case.refusal or not check_rules(case.recipe, case.num_ranks), case.name
    base, by_name = cases[0], {case.name: case for case in cases}
    assert base.fits and changed_parts(base, base) == []
    again = by_name['memory.recompute = ["block"]']
    assert again.prediction is not None and base.prediction is not None
    assert again.peak_gib < base.peak_gib
    assert changed_parts(again, base)[0][0] == "recompute"
    (half,) = [case for name, case in by_name.items() if name.startswith("parallel.ep = 4")]
    assert half.fits or half.peak_gib > half.limit_gib
    twice = by_name["8 GPUs"]
    assert twice.num_ranks == 8 and twice.prediction is not None
    assert by_name["on H200"].limit_gib > base.limit_gib
    assert by_name["on B200"].prediction is not None and not by_name["on B200"].prediction.rates.is_measured


def test_fields_that_must_follow_do(cases: list[Case]) -> None:
    words = [case.name for case in cases if not case.refusal]
    assert any(name.startswith("parallel.pp = 2") for name in words)
    assert any(name.startswith('parallel.dispatcher = "alltoall", with') and "overlap" in name for name in words)


def test_what_follows_does_not_take_a_change_back() -> None:
    on_cpu = what_if(load_recipe(RECIPE.with_name("quickstart.toml"), []), 1, "H100")
    (recorded,) = [case for case in on_cpu if case.name == 'compile.cudagraph = "step"']
    assert "has no CUDA graphs" in recorded.refusal


def test_what_does_not_fit_says_so(cases: list[Case]) -> None:
    text = describe_what_if(cases)
    assert text.splitlines()[1].endswith("as it is")
    assert "on B200 (by its data sheet)" in text
    large = [case for case in cases if not case.refusal and not case.fits]
    assert text.count("does NOT fit") == len(large)


def test_of_the_best_layout_and_of_a_recipe() -> None:
    best = json.loads(plan(RECIPE, SMALL, 2, gpu="H100", top=1, as_json=True, what_if="best"))
    own = json.loads(plan(RECIPE, [*SMALL, "--parallel.ep=2"], 2, gpu="H100", as_json=True, what_if="recipe"))
    assert best[0]["change"] == own[0]["change"] == "as it is"
    assert best[0]["tokens_per_second_per_gpu"] >= 0.99 * own[0]["tokens_per_second_per_gpu"]
    with pytest.raises(RecipeError, match="does not divide"):
        plan(RECIPE, ["--parallel.ep=3"], 2, gpu="H100", what_if="recipe")
