"""The search of layouts: what it finds passes the rules, fits, and is the fastest of all candidates."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.config import Recipe, check_rules, load_recipe
from titan_moe.config.parallel import planning
from titan_moe.entry import plan
from titan_moe.plan.cost.rates import rates_of
from titan_moe.plan.cost.step_time import predict
from titan_moe.plan.resolved import Resolved
from titan_moe.plan.search import fewest_ranks, search
from titan_moe.plan.search_report import as_rows, describe_plan
from titan_moe.plan.search_space import candidates_of, divisors, layouts_of

RECIPE = Path(__file__).parents[2] / "recipes" / "qwen3_30b_a3b.toml"
SMALL = ["--model.num_layers=6", "--train.global_batch_sequences=32"]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe(RECIPE, SMALL)


def test_found_layouts_pass_the_rules_and_fit(recipe: Recipe) -> None:
    with planning():
        result = search(recipe, 4, "H100", 5)
        assert len(result.found) == 5
        speeds = [found.prediction.tokens_per_second for found in result.found]
        assert speeds == sorted(speeds, reverse=True)
        assert len({found.candidate.layout for found in result.found}) == 5
        for found in result.found:
            assert not check_rules(found.recipe, 4)
            assert found.peak_gib < 79


def test_nothing_that_needs_no_recompute_is_faster(recipe: Recipe) -> None:
    rates = rates_of("H200")
    assert rates is not None
    with planning():
        best = search(recipe, 2, "H200", 1).found[0]
        for candidate in candidates_of(recipe, 2):
            other = replace(candidate.of(recipe), memory=replace(recipe.memory, recompute=("none",)))
            if not check_rules(other, 2):
                speed = predict(Resolved(other, 2), rates).tokens_per_second
                assert speed <= 1.002 * best.prediction.tokens_per_second, candidate


def test_given_fields_are_kept(recipe: Recipe) -> None:
    with planning():
        result = search(recipe, 4, "H100", 3, {"pp": 2})
    assert result.found
    assert all(found.recipe.parallel.pp == 2 for found in result.found)


def test_the_fewest_ranks_that_hold_a_step(recipe: Recipe) -> None:
    whole = replace(recipe, model=replace(recipe.model, num_layers=24))
    with planning():
        number, result = fewest_ranks(whole, 8, "H200", {})
        assert result.found
        assert not search(whole, number // 2, "H200", 1).found


def test_what_cannot_run_is_said(recipe: Recipe) -> None:
    broken = replace(recipe, model=replace(recipe.model, vocab_size=0))
    with planning():
        result = search(broken, 2, "H100", 1)
        assert "vocab_size" in describe_plan(result, broken, 2, "H100")
    with pytest.raises(ValueError, match="not a known GPU"):
        search(recipe, 2, "a potato")


def test_a_plan_is_written_as_a_recipe_that_runs(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    text = plan(RECIPE, SMALL, 4, gpu="H100", top=2, tokens_per_step=131072, write=str(out))
    assert "limited by" in text
    written = load_recipe(out)
    assert not check_rules(replace(written, model=replace(written.model, num_layers=6)), 4)
    assert written.train.global_batch_sequences == 32


def test_frozen_parameters_have_no_states() -> None:
    recipe = load_recipe(RECIPE.with_name("qwen3_30b_a3b_lora.toml"))
    with planning():
        assert search(recipe, 4, "H100", 1).found


def test_rows_are_data(recipe: Recipe) -> None:
    with planning():
        (row,) = as_rows(search(recipe, 2, "H100", 1), 2)
    assert row["overrides"]["parallel.dp_shard"] == -1
    assert row["step_ms"] == pytest.approx(sum(row["parts_ms"].values()), rel=1e-3)


def test_layouts_divide_ranks_and_experts(recipe: Recipe) -> None:
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    with planning():
        for layout in layouts_of(recipe, 24):
            assert 24 % (layout.pp * layout.dp_replicate * layout.ep * layout.etp) == 0
            assert 128 % layout.ep == 0
