"""Which modules have which format, and why others have none."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.config import Recipe, RecipeError, check_rules, load_recipe
from titan_moe.config.mtp import MTPConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.plan.check_report import describe
from titan_moe.plan.choice.formats import (
    FASTER_FROM,
    FormatChoice,
    choose_formats,
    describe_formats,
    keep_slower_in_compute,
    resolve_backend,
)
from titan_moe.plan.choice.hardware import Capability
from titan_moe.plan.choice.kernel_table import read_tables

RECIPES = Path(__file__).parents[3] / "recipes"
HOPPER = (9, 0)


def recipe(name: str, **precision: object) -> Recipe:
    words = [f"--precision.{key}={value}" for key, value in precision.items()]
    recipe = load_recipe(RECIPES / f"{name}.toml", ["--precision.linears=fp8_rowwise", *words])
    assert check_rules(recipe, 8) == []
    return recipe


def chosen(choices: list[FormatChoice]) -> dict[str, tuple[str, str]]:
    return {choice.module.name: (str(choice.formats), choice.reason) for choice in choices}


def test_formats_of_first_and_last_layers_and_of_patterns_are_compute() -> None:
    r = recipe(
        "qwen3_30b_a3b",
        num_layers_at_start_in_compute=1,
        num_layers_at_end_in_compute=2,
        modules_in_compute="layers.4.*",
        wgrad="compute",
    )
    formats = chosen(choose_formats(r))
    assert formats["layers.0.attention.qkv"] == ("compute", "num_layers_at_start_in_compute = 1")
    assert formats["layers.1.attention.qkv"] == ("fp8_rowwise (wgrad compute)", "")
    assert formats["layers.4.attention.out"] == ("compute", 'modules_in_compute: "layers.4.*"')
    assert formats["layers.45.attention.out"] == ("fp8_rowwise (wgrad compute)", "")
    assert formats["layers.46.attention.out"] == ("compute", "num_layers_at_end_in_compute = 2")
    assert formats["layers.1.feed_forward.experts"] == ("compute", "")


@pytest.mark.parametrize("number", [0, 2])
def test_last_layers_in_compute_are_those_of_the_model_and_all_behind_them(number: int) -> None:
    r = recipe("qwen3_30b_a3b", num_layers_at_end_in_compute=number)
    ahead = replace(r, model=replace(r.model, mtp=MTPConfig(1)))
    choices = choose_formats(ahead)
    formats = {name: chosen for name, (chosen, _) in chosen(choices).items() if name.endswith(("out", "eh_proj"))}
    kept = ["layers.46.attention.out", "layers.47.attention.out", "layers.48.attention.out", "layers.48.eh_proj"]
    assert len(formats) == 50 and [name for name, own in formats.items() if own == "compute"] == kept * (number > 0)
    assert "layers.48.eh_proj" in " ".join(describe_formats(ahead, choices))


def test_formats_need_widths_of_whole_blocks() -> None:
    formats = chosen(choose_formats(recipe("deepseek_v2_lite", linears="fp8_blockwise")))
    assert formats["layers.0.attention.kv_down"] == ("compute", "width 576 is no multiple of 128")
    assert formats["layers.0.feed_forward.down"] == ("compute", "width 10944 is no multiple of 128")
    assert formats["layers.0.attention.q_up"] == ("fp8_blockwise", "")
    rowwise = chosen(choose_formats(recipe("deepseek_v2_lite")))
    assert rowwise["layers.0.attention.kv_down"] == ("fp8_rowwise", "")


def test_formats_are_described_by_ranges_of_layers() -> None:
    r = recipe("deepseek_v2_lite", modules_in_compute="layers.3.*,*.kv_down")
    head, *lines, last = describe_formats(r, choose_formats(r))
    assert head == (
        "native: fp8_rowwise on compute capability 9.0 and later; speed not measured, so no format is dropped for it"
    )
    assert lines == [
        "fp8_rowwise: layers.0-2,4-26.attention.q_up|kv_up|out, layers.0.feed_forward.gate_up|down, "
        "layers.1-2,4-26.feed_forward.shared_experts.gate_up|down",
        'bf16: layers.0-2,4-26.attention.kv_down (modules_in_compute: "*.kv_down")',
        "bf16: layers.1-26.feed_forward.experts",
        "bf16: layers.3.attention.q_up|kv_down|kv_up|out, layers.3.feed_forward.shared_experts.gate_up|down "
        '(modules_in_compute: "layers.3.*")',
    ]
    assert last == "bf16 or finer: embedding, head, router, norms, gates of shared experts and attention core"


def test_check_names_formats_only_where_there_are_some() -> None:
    assert "\nformats     native: fp8_rowwise" in describe(recipe("qwen3_30b_a3b"), 8)
    assert "\nformats" not in describe(load_recipe(RECIPES / "qwen3_30b_a3b.toml"), 8)
    emulated = describe(recipe("qwen3_30b_a3b", backend="emulated"), 8)
    assert "formats     emulated: the numerics of formats without their speed; no format is dropped" in emulated


def test_gate_agrees_with_every_measurement_by_more_than_noise() -> None:
    """2 % of noise. Experts gain wherever they were measured, linear layers where the bound says so."""
    seen = set()
    for entry in read_tables()["NVIDIA H200"]:
        for name, ms in entry.ms.items():
            if not entry.operation.endswith("_in_formats") or name == "compute":
                continue
            is_slower = False
            if entry.operation == "linear_in_formats":
                is_slower = bool(FASTER_FROM[HOPPER][name].why_slower(entry.shape["input"], entry.shape["output"]))
            assert ms > 1.02 * entry.ms["compute"] if is_slower else ms < 0.98 * entry.ms["compute"], (entry, name)
            seen.add((entry.operation, name, is_slower))
    linears = {("linear_in_formats", name, is_slower) for name in FASTER_FROM[HOPPER] for is_slower in (False, True)}
    assert seen == linears | {("experts_in_formats", name, False) for name in ("fp8_rowwise", "fp8_blockwise")}


def test_gate_keeps_compute_where_a_format_is_slower() -> None:
    r = recipe("deepseek_v2_lite")
    choices = choose_formats(r, HOPPER)
    formats = chosen(choices)
    assert formats["layers.7.attention.q_up"] == ("fp8_rowwise", "")
    reason = "fp8_rowwise is slower below an input width of 1,024"
    assert formats["layers.7.attention.kv_up"] == ("compute", reason)
    assert "; formats only where faster" in describe_formats(r, choices, HOPPER)[0]
    page = describe(r, 8)
    assert f"on GPUs of compute capability 9.0: bf16: layers.0-26.attention.kv_up ({reason})" in page
    assert "; formats only where faster\n" in page
    p = keep_slower_in_compute(r.precision, choices)
    assert (p.only_where_faster, p.modules_in_compute) == (False, ("layers.*.attention.kv_up",))


@pytest.mark.parametrize(
    ("name", "precision", "slower"),
    [
        ("deepseek_v2_lite", "fp8_rowwise", {"kv_up"}),
        ("deepseek_v2_lite", "fp8_tensorwise", {"kv_up"}),
        ("deepseek_v2_lite", "fp8_blockwise", {"q_up", "kv_up", "out", "down"}),
        ("deepseek_v3", "fp8_rowwise", {"kv_up"}),
        ("deepseek_v3", "fp8_blockwise", set()),
        *(
            (name, f"fp8_{scales}wise", set())
            for name in ("qwen3_30b_a3b", "mixtral_8x7b")
            for scales in ("row", "block")
        ),
    ],
)
def test_gate_of_the_recipes_on_hopper(name: str, precision: str, slower: set[str]) -> None:
    r = load_recipe(RECIPES / f"{name}.toml", [f"--precision.linears={precision}"])
    choices = choose_formats(r, HOPPER)
    assert {choice.module.path.rpartition(".")[2] for choice in choices if choice.is_slower} == slower


def test_gate_asks_for_the_widths_of_a_rank() -> None:
    """The input of `out` is split over tp."""
    for tp, expected in ((4, "fp8_rowwise"), (8, "compute")):
        r = load_recipe(RECIPES / "qwen3_30b_a3b.toml", ["--precision.linears=fp8_rowwise", f"--parallel.tp={tp}"])
        assert chosen(choose_formats(r, HOPPER))["layers.0.attention.out"][0] == expected


@pytest.mark.parametrize(
    ("options", "capability", "words"),
    [
        ({"only_where_faster": "false"}, HOPPER, "; no format is dropped for speed"),
        ({"backend": "emulated"}, HOPPER, "; no format is dropped for speed"),
        ({}, (10, 0), "; speed not measured, so no format is dropped for it"),
        ({"wgrad": "compute"}, HOPPER, "; speed not measured, so no format is dropped for it"),
    ],
)
def test_gate_is_not_asked(options: dict[str, str], capability: Capability, words: str) -> None:
    r = recipe("deepseek_v2_lite", **options)
    choices = choose_formats(r, capability)
    assert not any(choice.is_slower for choice in choices)
    assert describe_formats(r, choices, capability)[0].endswith(words)


def test_backend_is_refused_where_there_are_no_matrix_units() -> None:
    rowwise = PrecisionConfig(linears="fp8_rowwise")
    assert resolve_backend(rowwise, (9, 0)) == "native"
    assert resolve_backend(PrecisionConfig(linears="mxfp8"), (10, 0)) == "native"
    assert resolve_backend(PrecisionConfig(linears="mxfp8", backend="emulated"), None) == "emulated"
    for precision, capability, said in (
        (rowwise, None, "compute capability 9.0 and later, and this device is no GPU"),
        (rowwise, (8, 0), "and this GPU has 8.0; take precision.backend = "),
        (PrecisionConfig(linears="mxfp8", backend="native"), (9, 0), 'precision.backend = "native" computes mxfp8'),
    ):
        with pytest.raises(RecipeError) as refused:
            resolve_backend(precision, capability)
        assert refused.value.problems[0].endswith('or precision.linears = "compute"')
        assert said in refused.value.problems[0] and '"emulated"' in refused.value.problems[0]
