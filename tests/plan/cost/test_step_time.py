"""Predicted steps are near those that were measured (tools/results), and in their order."""

import tomllib
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from titan_moe.config import Recipe, load_recipe
from titan_moe.plan.cost.block_time import layer_times
from titan_moe.plan.cost.rates import Rates, rates_of
from titan_moe.plan.cost.rates_file import rates_from
from titan_moe.plan.cost.step_time import Prediction, largest_of, predict
from titan_moe.plan.resolved import Resolved

RECIPES = Path(__file__).parents[3] / "recipes"
CALLS = tomllib.loads(Path(__file__).with_name("measured_steps.toml").read_text("utf-8"))["calls"]
HELD_BACK = tomllib.loads(Path(__file__).with_name("held_back_steps.toml").read_text("utf-8"))["calls"]
MEDIAN, WORST = 0.06, 0.15
MEDIAN_PEAK, WORST_PEAK, ROOM = 0.02, 0.07, 1.125


def predicted(row: dict[str, str], gpus: int, card: str) -> Prediction:
    """The prediction of a measured row."""
    rates = rates_of(card)
    assert rates is not None
    return predict(Resolved(recipe_of(row), gpus), rates, float(row.get("load", 0.0)))


def recipe_of(row: dict[str, str]) -> Recipe:
    return load_recipe(RECIPES / f"{row['recipe']}.toml", row["overrides"].split())


def rows_of(calls: list[dict[str, Any]]) -> list[tuple[dict[str, str], dict[str, str], float]]:
    """Calls and rows with tokens/s as predicted."""
    return [
        (call, row, predicted(row, call["gpus"], call["card"]).tokens_per_second)
        for call in calls
        for row in call["rows"]
    ]


@pytest.fixture(scope="module")
def rows() -> list[tuple[dict[str, str], dict[str, str], float]]:
    """Those of the calls that were in view."""
    return rows_of(CALLS)


def test_near_what_was_measured(rows: list[tuple[dict[str, str], dict[str, str], float]]) -> None:
    held = [(call, row, abs(value / float(row["tokens"]) - 1)) for call, row, value in rows if "calibrates" not in row]
    assert len(rows) - len(held) < 10
    assert len(held) >= 40
    assert max(error for *_, error in held) <= WORST, max(held, key=lambda each: each[2])
    assert median(error for *_, error in held) <= MEDIAN
    for card in ("H100", "H200"):
        assert median(error for call, _, error in held if call["card"] == card) <= MEDIAN
    assert median(error for _, row, error in held if "fp8" in row["overrides"]) <= MEDIAN
    assert median(error for _, row, error in held if "fp8" not in row["overrides"]) <= MEDIAN


@pytest.fixture(scope="module")
def later() -> list[tuple[dict[str, str], dict[str, str], float]]:
    """The same of the calls that were held back."""
    return rows_of(HELD_BACK)


def test_near_what_was_measured_later(later: list[tuple[dict[str, str], dict[str, str], float]]) -> None:
    errors = []
    for _, row, value in later:
        if "calibrates" in row:
            continue
        error = abs(value / float(row["tokens"]) - 1)
        assert error <= WORST, (row, error)
        errors.append(error)
    assert median(errors) <= MEDIAN


def test_near_by_a_table_that_calibrate_wrote() -> None:
    with rates_from(str(Path(__file__).with_name("calibrated_h100.toml"))):
        later = rows_of(HELD_BACK)
    assert all(call["card"] == "H100" for call, *_ in later)
    assert median(abs(value / float(row["tokens"]) - 1) for _, row, value in later) <= MEDIAN


def test_peaks_are_near_what_was_measured_later() -> None:
    errors = []
    for call in HELD_BACK:
        for row in (row for row in call["rows"] if "gib" in row):
            resolved = Resolved(recipe_of(row), call["gpus"])
            planned = resolved.peak_bytes(ROOM) + resolved.shared_bytes
            errors.append(abs(planned / 2**30 / float(row["gib"]) - 1))
            assert errors[-1] <= WORST_PEAK, (row, errors[-1])
    assert median(errors) <= MEDIAN_PEAK


def test_an_adapter_takes_bytes_and_a_base_in_codes_more() -> None:
    small = "--model.num_layers=2", "--memory.recompute=block"

    def parts(*overrides: str) -> dict[str, float]:
        recipe = load_recipe(RECIPES / "qwen3_30b_a3b_lora.toml", [*small, *overrides])
        return dict(predict(Resolved(recipe, 1), Rates()).parts)

    codes, compute, wide = parts(), parts("--model.adapter.base=compute"), parts("--model.adapter.rank=1024")
    apart = parts("--model.adapter.base=compute", "--precision.linears=fp8_rowwise")
    assert "codes" not in compute
    # by hand: numbers of two layers, 3 bytes each, forward and backward, in 4 microbatches; qkv's input needs no
    # gradient in the first layer
    numbers = (2 * 2 * (10_485_760 + 8_388_608 + 603_979_776) - 10_485_760) * 3 * 4
    assert codes["codes"] == pytest.approx(numbers / Rates().memory)
    assert codes["adapters"] == compute["adapters"] < wide["adapters"] / 3
    assert compute["adapters"] < apart["adapters"], "GEMMs of fp8 do not add them"
    assert codes["recompute"] > compute["recompute"]


def test_copies_of_experts_are_made_again() -> None:
    def passes(again: str) -> float:
        fields = ("parallel.accumulate_unsharded=false", "parallel.ep=4", "precision.master=fp32", "model.num_layers=4")
        overrides = [f"--{field}" for field in (*fields, f"memory.recompute={again}")]
        return predict(Resolved(load_recipe(RECIPES / "mixtral_8x7b.toml", overrides), 4), Rates()).parts["passes"]

    some, every, none = passes("expert_weights:-2"), passes("expert_weights"), passes("none")
    assert every - some == pytest.approx(some - none)
    assert some > none


def test_sharded_experts_are_copied_at_each_gather() -> None:
    def passes(*overrides: str) -> float:
        fields = ("parallel.ep=2", "model.num_layers=4", "train.global_batch_sequences=32", "memory.recompute=none")
        words = [f"--{field}" for field in (*fields, *overrides)]
        return predict(Resolved(load_recipe(RECIPES / "qwen3_30b_a3b.toml", words), 8), Rates()).parts["passes"]

    # by hand: 64 experts of a rank in four layers, shared by four ranks: 8 bytes of each number, 10 of a shard's
    numbers = 4 * 64 * 3 * 2048 * 768
    again = passes() - passes("parallel.reshard_experts_after_forward=false")
    assert again == pytest.approx(numbers * (8 + 10 / 4) / Rates().memory)


@pytest.mark.parametrize("of", ["rows", "later"])
def test_order_in_a_call(of: str, request: pytest.FixtureRequest) -> None:
    """Of layouts of a model that were measured in one call; those within 1 % of each other have no order."""
    rows = request.getfixturevalue(of)
    for call in CALLS if of == "rows" else HELD_BACK:
        of_call = [(row, value) for of, row, value in rows if of is call]
        inverted = 0
        for (row, value), (other, of_other) in combinations(of_call, 2):
            measured = float(row["tokens"]) / float(other["tokens"])
            if row["recipe"] == other["recipe"] and abs(measured - 1) > 0.01:
                inverted += (measured > 1) != (value > of_other)
        assert inverted <= 1, call["name"]


def test_parts_make_the_step() -> None:
    row = next(row for call in CALLS for row in call["rows"] if "pp=4" in row["overrides"])
    found = predicted(row, 4, "H200")
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert 0 < found.bubble < 0.5
    assert 0 < found.mfu < 1


def test_other_cards_follow_their_data_sheet() -> None:
    a100, measured = rates_of("A100-80GB"), rates_of("H200")
    assert a100 is not None
    assert measured is not None
    assert not a100.is_measured
    assert measured.is_measured
    assert a100.dense < measured.dense / 3
    assert rates_of("an unknown card") is None


def test_layers_of_a_kind_share_times() -> None:
    recipe = load_recipe(RECIPES / "deepseek_v2_lite.toml", ["--parallel.ep=2"])
    times = layer_times(recipe, 2, Rates(), 1.0)
    assert "experts" not in times[0]
    assert times[1] is times[2]
    assert layer_times(recipe, 2, Rates(), 1.1)[1]["experts"].total == pytest.approx(1.1 * times[1]["experts"].total)


@pytest.mark.parametrize(("name", "share"), [("mixtral_8x7b", 1 / 2), ("deepseek_v2_lite", 192 / 320)])
def test_measured_logits_are_a_product_of_forward(name: str, share: float) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml", ["--optim.qk_clip.threshold=100"])
    plain = load_recipe(RECIPES / f"{name}.toml", [])
    measured, without = (layer_times(it, 8, Rates(), 1.0)[0]["attention"] for it in (recipe, plain))
    assert measured.forward == without.forward
    assert measured.total - without.total == pytest.approx(share * without.forward)


def test_the_slowest_of_several() -> None:
    assert largest_of(1) == 0
    assert largest_of(4) == pytest.approx(1.03, abs=0.02)
