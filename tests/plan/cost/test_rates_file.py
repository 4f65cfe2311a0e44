"""Tables of rates: shapes give back the rates that predict them, and files are read or refused with reasons."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.config import RecipeError, load_recipe
from titan_moe.entry import plan
from titan_moe.plan.choice.hardware import find_hardware
from titan_moe.plan.choice.kernel_table import TABLES
from titan_moe.plan.cost.gemm_time import attention_passes, expert_passes, linear_seconds
from titan_moe.plan.cost.rates import Rates, rates_of
from titan_moe.plan.cost.rates_file import (
    NAMES,
    Measurement,
    of_attention,
    of_experts,
    of_linear,
    rates_from,
    read_rates,
    written,
)
from titan_moe.plan.cost.step_time import CODES, predict
from titan_moe.plan.resolved import Resolved

RECIPES = Path(__file__).parents[3] / "recipes"


def test_a_shape_gives_back_the_rate_that_predicts_it() -> None:
    rates = replace(Rates(), dense=500e12, grouped=400e12, grouped_codes=900e12, memory=3e12, attention_backward=300e12)
    ms = 1e3 * linear_seconds(rates, 4096, (2048, 768), has_codes=False)
    assert of_linear(4096, (2048, 768), ms, has_codes=False).value == pytest.approx(rates.dense)
    for has_codes, rate in ((False, rates.grouped), (True, rates.grouped_codes)):
        ms = 1e3 * expert_passes(rates, 8192, 3000, 16, (2048, 768), has_codes=has_codes).total
        ms += 1e3 * has_codes * CODES * 3 * 16 * 2048 * 768 / rates.memory
        found = of_experts(3000, 8192, 16, (2048, 768), ms, rates.memory, has_codes=has_codes)
        assert found.value == pytest.approx(rate)
    with pytest.raises(ValueError, match="less than their passes"):
        of_experts(3000, 8192, 16, (2048, 768), 1e-3, rates.memory, has_codes=False)
    passes = attention_passes(rates, 2.0 * 32 * 4096**2 * 128, 4096, is_windowed=False)
    forward, backward = of_attention(4096, 32, 128, 1e3 * passes.forward, 1e3 * passes.total)
    assert forward.value == pytest.approx(rates.attention_forward)
    assert backward.value == pytest.approx(rates.attention_backward)


def test_a_table_that_is_written_is_read(tmp_path: Path) -> None:
    shape = {"rows": 4096}
    measured = [Measurement("dense", shape, 1.0, value) for value in (5e14, 6e14, 9e14)]
    measured += [Measurement(name, shape, 1.0, 7e12) for name in ("grouped", "memory")]
    file = tmp_path / "rates.toml"
    file.write_text(written("NVIDIA A100-SXM4-80GB", measured, "one line\nanother"), "utf-8")
    assert file.read_text("utf-8").startswith("# one line\n# another\ndevice")
    device, rates = read_rates(file)
    by_sheet = rates_of("A100-80GB")
    assert by_sheet is not None and find_hardware(device) == find_hardware("A100-80GB")
    assert (rates.dense, rates.grouped, rates.link) == (6e14, 7e12, by_sheet.link)
    assert rates.is_measured and not by_sheet.is_measured
    with rates_from(str(file)) as of_file:
        assert of_file == device
        assert rates_of("A100-80GB") == rates
        assert rates_of("H100") != rates
    assert rates_of("A100-80GB") == by_sheet
    with rates_from(None) as of_file:
        assert of_file is None


def test_the_shipped_tables_have_the_same_form() -> None:
    for file in sorted((TABLES / "rates").glob("*.toml")):
        device, rates = read_rates(file)
        assert rates_of(device) == rates
        assert file.read_text("utf-8").count(" = ") >= len(NAMES)


def test_a_faster_card_is_predicted_to_be_faster(tmp_path: Path) -> None:
    words = ["--model.num_layers=4", "--train.global_batch_sequences=32"]
    recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml", [*words, "--parallel.ep=2"])
    file = tmp_path / "rates.toml"
    file.write_text(
        'device = "NVIDIA H100"\n[rates]\ngrouped = 900e12\ndense = 900e12\nmemory = 4e12\nnode_link = 90e9\n'
    )
    plain, with_rates = rates_of("H100"), read_rates(file)[1]
    assert plain is not None and with_rates.node_link_is_measured
    resolved = Resolved(recipe, 2)
    assert predict(resolved, with_rates).tokens_per_second > 1.1 * predict(resolved, plain).tokens_per_second
    with rates_from(str(file)):
        fast = plan(RECIPES / "qwen3_30b_a3b.toml", words, 16, gpu="H100", top=1)
    assert "were not measured" not in fast


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("device = ", "cannot be read"),
        ("[rates]\ndense = 1e12", "lacks device"),
        ('device = "a potato"\n[rates]\ndense = 1e12', "not known"),
        ('device = "NVIDIA H100"\n[rates]\ndence = 1e12', "the rates are dense"),
        ('device = "NVIDIA H100"\n[rates]\ndense = -1.0', "no rate above 0"),
        ('device = "NVIDIA H100"\n[rates]\ndense = true', "no rate above 0"),
        ("\udcff", "cannot be read"),  # no UTF-8
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "rates.toml"
    file.write_text(text, "utf-8", errors="surrogateescape")
    with pytest.raises(RecipeError, match=words):
        read_rates(file)
