"""The kernels that `perf.kernels = "auto"` chooses, and its reasons."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.config import Recipe, check_rules, load_recipe
from titan_moe.config.kernels import DEFAULT_KERNELS, PRESETS, KernelOverrides
from titan_moe.plan.check_report import describe
from titan_moe.plan.hardware import Capability
from titan_moe.plan.kernel_choice import as_overrides, backends_that_can_run, choose_for, describe_choices
from titan_moe.plan.kernel_shapes import shapes_of
from titan_moe.plan.kernel_table import KernelTable, Measured, table_name, write_table

RECIPES = Path(__file__).parents[2] / "recipes"
GPU = "Some GPU"
"""One that the package has no table of."""
FULL = ("--train.micro_batch_sequences=4", "--parallel.overlap=none")
"""16,384 tokens a rank, without the overlap that needs fused experts."""


def recipe(*overrides: str) -> Recipe:
    return load_recipe(RECIPES / "qwen3_30b_a3b.toml", [*FULL, *overrides])


@pytest.fixture
def measured(cache: Path) -> None:
    """On some GPU the fused experts are faster at the shape of this recipe."""
    measure(cache, recipe(), "experts", fused=6.0, grouped_mm=7.0)


def kernels_of(recipe: Recipe, device: str | None):
    return as_overrides(recipe.perf, choose_for(recipe, 8, device)).chosen_kernels


def measure(cache: Path, recipe: Recipe, operation: str, device: str = GPU, **ms: float) -> None:
    """Write a table of the user with one measurement."""
    entry = Measured(operation, shapes_of(recipe, 8)[operation], ms, "2.13.0", "3.7.1", "2026-11-21")
    write_table(cache / table_name(device), KernelTable(device, (entry,)))


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (None, "not measured; titan-moe tune does it"),
        ("NVIDIA A100-SXM4-80GB", "not measured; titan-moe tune does it"),
        ("CPU", "a CPU has no Triton"),
    ],
)
def test_auto_takes_the_default_kernels_without_measurements(device: str | None, reason: str) -> None:
    assert Recipe().perf.kernels == "auto" and Recipe().perf.chosen_kernels == DEFAULT_KERNELS
    assert kernels_of(recipe(), device) == DEFAULT_KERNELS
    (line,) = describe_choices(choose_for(recipe(), 8, device))
    assert line.endswith(f"({reason})")


def test_auto_takes_the_table_at_a_measured_shape(measured: None) -> None:
    assert kernels_of(recipe(), GPU) == replace(DEFAULT_KERNELS, experts="fused")
    experts, others = describe_choices(choose_for(recipe(), 8, GPU))
    assert experts.startswith("experts fused (6 ms fused, 7 ms grouped_mm, measured on Some GPU at 87")
    assert "131,072 slots, 16 experts" in experts and experts.endswith("with torch 2.13.0, 2026-11-21)")
    assert others.startswith("permute torch, router torch, ")
    assert others.endswith("(not measured; titan-moe tune does it)")


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "deepseek_v2_lite", "mixtral_8x7b"])
def test_auto_has_shipped_tables_of_an_h200(name: str) -> None:
    """As the recipes over 8 ranks: all in Triton. What a recipe overrides needs no measurement."""
    shipped = load_recipe(RECIPES / f"{name}.toml")
    taken = kernels_of(shipped, "NVIDIA H200")
    has_rotary = shipped.model.attention.kind == "gqa"
    assert taken == replace(PRESETS["fused"], rotary="triton" if has_rotary else "torch")
    choices = [choice for choice in choose_for(shipped, 8, "NVIDIA H200") if not choice.reason.startswith("perf.")]
    assert all(choice.nearest and choice.nearest.ratio < 3 for choice in choices)


def test_auto_takes_the_nearest_shape_and_states_the_distance() -> None:
    """Half of the ranks, twice the experts on each; no table has such a shape."""
    four = recipe("--parallel.ep=4")
    assert kernels_of(four, "NVIDIA H200") == replace(PRESETS["fused"], gradients="torch")
    (line,) = [line for line in describe_choices(choose_for(four, 8, "NVIDIA H200")) if line.startswith("permute")]
    rows = shapes_of(four, 8)["permute"]["rows"]
    assert line.startswith(
        "permute triton (0.0395 ms triton, 0.723 ms torch, measured on NVIDIA H200 at the nearest shape, "
        f"x{2 * 87_480 / rows:.3g} away: 87,480 rows, 8 choices, 131,072 slots, 16 experts, eager with torch "
    )


@pytest.mark.parametrize(("device", "capability"), [("NVIDIA H100 80GB HBM3", None), ("NVIDIA X1", (9, 0))])
def test_auto_takes_tables_of_the_architecture(device: str, capability: Capability | None) -> None:
    choices = choose_for(recipe(), 8, device, capability)
    assert choices == choose_for(recipe(), 8, "NVIDIA H200")
    assert all("measured on NVIDIA H200 at " in line for line in describe_choices(choices))


def test_auto_prefers_the_users_table(cache: Path) -> None:
    for device in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        before = kernels_of(recipe(), device)
        assert before.router == "triton"
        measure(cache, recipe(), "router", device, triton=2.0, torch=1.0)
        assert kernels_of(recipe(), device) == replace(before, router="torch")
    tiny = recipe("--model.hidden_size=64", "--model.vocab_size=512", "--train.seq_len_tokens=64")
    measure(cache, tiny, "head", "NVIDIA H200", triton=2.0, torch=1.0)
    assert kernels_of(tiny, "NVIDIA H200").head == "torch"
    assert kernels_of(recipe(), "NVIDIA H200").head == "triton", "the shipped measurement is nearer"


def test_auto_ignores_what_is_not_comparable() -> None:
    whole = recipe("--perf.loss_chunk_tokens=0")
    assert kernels_of(whole, "NVIDIA H200").head == "torch" and kernels_of(recipe(), "NVIDIA H200").head == "triton"
    assert "head torch (not measured; titan-moe tune does it)" in describe_choices(choose_for(whole, 8, "NVIDIA H200"))


def test_auto_takes_the_head_of_a_part_of_the_vocabulary_by_the_nearest_whole_one() -> None:
    parts = recipe("--parallel.tp=2", "--parallel.ep=4")
    (head,) = [choice for choice in choose_for(parts, 8, "NVIDIA H200") if choice.operation == "head"]
    assert head.backend == "triton" and head.nearest is not None and head.nearest.ratio > 1


@pytest.mark.parametrize(
    ("fused_ms", "taken"), [(98.1, "grouped_mm"), (98.0, "fused"), (99.9, "grouped_mm"), (1, "fused")]
)
def test_auto_needs_a_gain_of_two_percent(cache: Path, fused_ms: float, taken: str) -> None:
    measure(cache, recipe(), "experts", fused=fused_ms, grouped_mm=100.0)
    (experts, *_) = choose_for(recipe(), 8, GPU)
    assert experts.backend == taken
    assert experts.reason == (
        "measured" if taken == "fused" else "fused is within 2 % of grouped_mm: the default stays"
    )


def test_auto_needs_no_gain_without_a_measured_default(cache: Path) -> None:
    measure(cache, recipe(), "experts", fused=5.0, reference=5.01)
    assert kernels_of(recipe(), GPU) == replace(DEFAULT_KERNELS, experts="fused")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("--run.device=cpu", "(a CPU has no Triton)"),
        ("--precision.compute=fp32", "(measured in bf16 alone)"),
        ("--precision.compute=fp64", "(measured in bf16 alone)"),
        ("--model.moe.score_on=input", "experts grouped_mm (fused cannot run here; 7 ms grouped_mm, 6 ms fused, "),
        (
            "--model.moe.expert_mlp_bias=true",
            "experts grouped_mm (fused cannot run here; 7 ms grouped_mm, 6 ms fused, ",
        ),
    ],
)
def test_auto_keeps_the_default_where_triton_cannot_run(measured: None, overrides: str, said: str) -> None:
    assert kernels_of(recipe(overrides), GPU) == DEFAULT_KERNELS
    assert said in describe_choices(choose_for(recipe(overrides), 8, GPU))[0]


def test_auto_takes_what_was_fastest(cache: Path) -> None:
    measure(cache, recipe(), "experts", fused=3.0, grouped_mm=2.0)
    assert kernels_of(recipe(), GPU) == DEFAULT_KERNELS
    measure(cache, recipe(), "head", triton=1.0, torch=2.0, gone=0.5)
    assert kernels_of(recipe(), GPU) == replace(DEFAULT_KERNELS, head="triton")
    measure(cache, recipe(), "gradients", triton=1.0, torch=2.0)
    assert kernels_of(recipe(), GPU) == replace(DEFAULT_KERNELS, gradients="triton")
    assert "1 ms triton, 2 ms torch, measured on Some GPU at 50,331,648 elements, bf16 to fp32" in str(
        describe_choices(choose_for(recipe(), 8, GPU))
    )


def test_auto_breaks_no_rule(cache: Path) -> None:
    weighs_input = recipe("--model.moe.score_on=input")
    measure(cache, weighs_input, "experts", fused=1.0, grouped_mm=2.0)
    assert backends_that_can_run(weighs_input, 8, "experts", ["fused", "grouped_mm"]) == ["grouped_mm"]
    (experts, *_) = choose_for(weighs_input, 8, GPU)
    assert experts.backend == "grouped_mm" and experts.nearest is not None


def test_auto_takes_fused_experts_for_tile_overlap(cache: Path) -> None:
    tiled = recipe("--parallel.overlap=tile", "--model.moe.ffn_hidden_size=512")
    measure(cache, tiled, "router", triton=1.0, torch=2.0)
    assert kernels_of(tiled, GPU) == replace(DEFAULT_KERNELS, experts="fused", router="triton")
    assert 'experts fused (parallel.overlap = "tile")' in describe_choices(choose_for(tiled, 8, GPU))
    assert kernels_of(tiled, None).experts == kernels_of(tiled, "CPU").experts == "fused"


def test_auto_yields_to_an_override(measured: None) -> None:
    changed = recipe("--perf.override.experts=grouped_mm", "--perf.override.head=triton")
    assert kernels_of(changed, GPU) == replace(DEFAULT_KERNELS, head="triton")
    lines = describe_choices(choose_for(changed, 8, GPU))
    assert "experts grouped_mm (perf.override.experts)" in lines and "head triton (perf.override.head)" in lines


def test_kernel_choices_leave_out_absent_operations() -> None:
    assert "gradients" in str(describe_choices(choose_for(recipe(), 8, None)))
    assert "gradients" not in str(describe_choices(choose_for(recipe(), 16, None))), "two ranks share each expert"


@pytest.mark.parametrize("preset", ["grouped_mm", "fused", "reference"])
def test_kernel_choices_of_a_preset_read_no_table(measured: None, preset: str) -> None:
    assert kernels_of(recipe(f"--perf.kernels={preset}"), GPU) == PRESETS[preset]


def test_kernel_choices_as_overrides_repeat_the_run(measured: None) -> None:
    before = recipe("--perf.override.head=torch")
    perf = as_overrides(before.perf, choose_for(before, 8, GPU))
    assert (perf.kernels, perf.override) == ("grouped_mm", KernelOverrides(experts="fused", head="torch"))
    after = replace(before, perf=perf)
    assert check_rules(after, 8) == [] and kernels_of(after, "CPU") == kernels_of(before, GPU)


def test_check_report_shows_kernels_by_device(measured: None) -> None:
    page = describe(recipe(), 8)
    assert "on NVIDIA H200\n" in page and "on Some GPU\n" in page and "experts fused (6 ms" in page
    assert "on other architectures\n" in page and "experts grouped_mm, permute torch" in page
    assert "H200" not in describe(recipe("--run.device=cpu", "--precision.compute=fp32"), 8)
    assert "  experts fused, permute triton, router triton" in describe(recipe("--perf.kernels=fused"), 8)
