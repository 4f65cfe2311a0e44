"""Which modules have which format, and why others have none."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from titan_moe.config import Recipe, RecipeError, check_rules, load_recipe
from titan_moe.config.precision import PrecisionConfig
from titan_moe.plan.check_report import describe
from titan_moe.plan.format_choice import (
    FormatChoice,
    choose_formats,
    describe_formats,
    keep_slower_in_compute,
    resolve_backend,
)
from titan_moe.plan.kernel_shapes import FORMAT_OPERATIONS, linear_shape
from titan_moe.plan.kernel_table import SHIPPED_TABLES, KernelTable, Measured, read_table, table_name, write_table

RECIPES = Path(__file__).parents[2] / "recipes"
GPU = "Some GPU"


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
    formats = chosen(choose_formats(r, None))
    assert formats["layers.0.attention.qkv"] == ("compute", "num_layers_at_start_in_compute = 1")
    assert formats["layers.1.attention.qkv"] == ("fp8_rowwise (wgrad compute)", "")
    assert formats["layers.4.attention.out"] == ("compute", 'modules_in_compute: "layers.4.*"')
    assert formats["layers.45.attention.out"] == ("fp8_rowwise (wgrad compute)", "")
    assert formats["layers.46.attention.out"] == ("compute", "num_layers_at_end_in_compute = 2")
    assert formats["layers.1.feed_forward.experts"] == ("compute", "")


def test_formats_need_widths_of_whole_blocks() -> None:
    formats = chosen(choose_formats(recipe("deepseek_v2_lite", linears="fp8_blockwise"), None))
    assert formats["layers.0.attention.kv_down"] == ("compute", "width 576 is no multiple of 128")
    assert formats["layers.0.feed_forward.down"] == ("compute", "width 10944 is no multiple of 128")
    assert formats["layers.0.attention.q_up"] == ("fp8_blockwise", "")
    rowwise = chosen(choose_formats(recipe("deepseek_v2_lite"), None))
    assert rowwise["layers.0.attention.kv_down"] == ("fp8_rowwise", "")


def test_formats_are_described_by_ranges_of_layers() -> None:
    r = recipe("deepseek_v2_lite", modules_in_compute="layers.3.*,*.kv_down")
    head, *lines, last = describe_formats(r, choose_formats(r, None))
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
    assert last == "bf16 or finer: embedding, head, router, norms, gates and attention core"


def test_check_names_formats_only_where_there_are_some() -> None:
    assert "\nformats     native: fp8_rowwise" in describe(recipe("qwen3_30b_a3b"), 8)
    assert "\nformats" not in describe(load_recipe(RECIPES / "qwen3_30b_a3b.toml"), 8)
    emulated = describe(recipe("qwen3_30b_a3b", backend="emulated"), 8)
    assert "formats     emulated: the numerics of formats without their speed; no format is dropped" in emulated


def measure(cache: Path, r: Recipe, ms: Mapping[tuple[int, int], Mapping[str, float]], device: str = GPU) -> None:
    entries = [
        Measured("linear_in_formats", linear_shape(r, widths), times, "2.11.0", "3.6.0", "2026-11-22")
        for widths, times in ms.items()
    ]
    write_table(cache / table_name(device), KernelTable(device, tuple(entries)))


def test_gate_keeps_compute_where_a_format_is_slower(cache: Path) -> None:
    r = recipe("qwen3_30b_a3b")
    qkv, out = (2048, 5120), (4096, 2048)
    measure(cache, r, {qkv: {"compute": 2.0, "fp8_rowwise": 1.5}, out: {"compute": 1.0, "fp8_rowwise": 0.99}})
    choices = choose_formats(r, GPU)
    formats = chosen(choices)
    assert formats["layers.7.attention.qkv"] == ("fp8_rowwise", "measured 1.5 ms, compute 2 ms on Some GPU")
    assert formats["layers.7.attention.out"] == (
        "compute",
        "fp8_rowwise is not faster: 0.99 ms, compute 1 ms on Some GPU",
    )
    assert "formats only where faster" in describe_formats(r, choices)[0]
    assert "on Some GPU: bf16: layers.0-47.attention.out (fp8_rowwise is not faster" in describe(r, 8)
    p = keep_slower_in_compute(r.precision, choices)
    assert (p.only_where_faster, p.modules_in_compute) == (False, ("layers.*.attention.out",))


def test_gate_takes_the_nearest_shape_with_both_times(cache: Path) -> None:
    r = recipe("qwen3_30b_a3b")
    near, far = (2048, 5120), (1024, 5120)
    measure(cache, r, {near: {"fp8_rowwise": 1.0, "mxfp8": 9.0}, far: {"compute": 1.0, "fp8_rowwise": 2.0}})
    assert chosen(choose_formats(r, GPU))["layers.0.attention.qkv"] == (
        "compute",
        "fp8_rowwise is not faster: 2 ms, compute 1 ms on Some GPU at the nearest shape, x2 away",
    )
    other_gemms = recipe("qwen3_30b_a3b", wgrad="compute")
    assert chosen(choose_formats(other_gemms, GPU))["layers.0.attention.qkv"] == ("fp8_rowwise (wgrad compute)", "")


@pytest.mark.parametrize("options", [{"only_where_faster": "false"}, {"backend": "emulated"}])
def test_gate_is_not_asked(cache: Path, options: dict[str, str]) -> None:
    r = recipe("qwen3_30b_a3b", **options)
    measure(cache, r, {(2048, 5120): {"compute": 1.0, "fp8_rowwise": 2.0}})
    assert chosen(choose_formats(r, GPU))["layers.0.attention.qkv"] == ("fp8_rowwise", "")


def test_shapes_of_formats_are_those_of_kernels() -> None:
    r = recipe("qwen3_30b_a3b")
    assert linear_shape(r, (3, 4)) == {"tokens": 16384, "input": 3, "output": 4}
    assert FORMAT_OPERATIONS["experts_in_formats"].shape(r)["experts"] == 16


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "mixtral_8x7b", "qwen3_30b_a3b"])
def test_experts_in_fp8_are_measured_on_hopper(name: str) -> None:
    """By the package's own table: faster at every measured shape."""
    r = recipe(name, linears="compute", experts="fp8_rowwise")
    experts = [choice for choice in choose_formats(r, "NVIDIA H200") if choice.module.part == "experts"]
    assert experts and all(str(choice.formats) == "fp8_rowwise" for choice in experts)
    assert {choice.reason.partition(" ")[0] for choice in experts} == {"measured"}
    entries = [
        entry
        for entry in read_table(SHIPPED_TABLES / "nvidia_h200.toml").measured
        if entry.operation == "experts_in_formats"
    ]
    assert entries and all(entry.ms["fp8_rowwise"] < 0.9 * entry.ms["compute"] for entry in entries)
    shape = FORMAT_OPERATIONS["experts_in_formats"].shape(r)
    assert all(entry.shape.keys() == shape.keys() for entry in entries)


def test_dense_layers_are_measured_on_hopper() -> None:
    """By the package's own table: up from a latent of 512 is slower, what is wider is faster."""
    r = recipe("deepseek_v2_lite", linears="fp8_rowwise", experts="compute")
    formats = {
        choice.module.path: str(choice.formats)
        for choice in choose_formats(r, "NVIDIA H200")
        if choice.module.path.startswith("attention")
    }
    assert formats.pop("attention.kv_up") == "compute"
    assert formats.keys() == {"attention.q_up", "attention.kv_down", "attention.out"}
    assert set(formats.values()) == {"fp8_rowwise"}


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
