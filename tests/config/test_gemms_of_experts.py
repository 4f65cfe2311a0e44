"""Whether experts have a format is asked of their modules, not of the recipe's words."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.config import Recipe, load_recipe
from titan_moe.config.arena import has_arena
from titan_moe.config.gemms import expert_formats, has_native_experts
from titan_moe.kernels.experts.fp8.packed import BLOCK, WHOLE_ROW, packed_width
from titan_moe.plan.check_report import describe
from titan_moe.plan.cost.memory import arena_bytes_per_rank, packed_bytes

QWEN3 = Path(__file__).parents[2] / "recipes" / "qwen3_30b_a3b.toml"


def recipe(*overrides: str) -> Recipe:
    return load_recipe(QWEN3, ["--precision.experts=fp8_rowwise", *overrides])


@pytest.mark.parametrize(
    "overrides", [("--precision.modules_in_compute=*.experts",), ("--model.moe.ffn_hidden_size=776",)], ids=str
)
def test_experts_that_all_stay_in_compute_are_plain(overrides: tuple[str, ...]) -> None:
    kept = recipe(*overrides)
    plain = replace(kept, precision=replace(kept.precision, experts="compute", modules_in_compute=()))
    assert expert_formats(kept) == {"compute"} and not has_native_experts(kept) and has_arena(kept, "fused")
    assert arena_bytes_per_rank(kept, 1.125) == arena_bytes_per_rank(plain, 1.125)


def test_some_experts_in_fp8_have_no_arena() -> None:
    mixed = recipe("--precision.num_layers_at_start_in_compute=1")
    assert expert_formats(mixed) == {"compute", "fp8_rowwise"}
    assert has_native_experts(mixed) and not has_arena(mixed, "fused")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            "--precision.num_layers_at_start_in_compute=1",
            "1 layer is in bf16, the others in fp8_rowwise (num_layers_at_s",
        ),
        (
            "--precision.num_layers_at_end_in_compute=40",
            "40 layers are in bf16, the others in fp8_rowwise (num_layers_at_e",
        ),
        (
            "--precision.modules_in_compute=layers.7.*",
            '1 layer is in bf16, the others in fp8_rowwise (modules_in_compute: "',
        ),
    ],
)
def test_check_says_that_mixed_formats_have_no_arena(overrides: str, words: str) -> None:
    (line,) = (line.strip() for line in describe(recipe(overrides), 8).splitlines() if "no arena" in line)
    assert line.startswith("no arena, whose rows have one size: experts of ") and words in line
    others = ["--precision.num_layers_at_start_in_compute=0"], [overrides, "--parallel.dispatcher=alltoall"]
    for other in others:
        assert "no arena" not in describe(recipe(*other, "--parallel.overlap=none"), 8), "there is one, or never was"


def test_the_plan_counts_the_scales_that_rows_have() -> None:
    blockwise = recipe("--precision.experts=fp8_blockwise")
    for width in (128, 384, 2048, 7168):
        assert packed_bytes(recipe(), width) == packed_width(width, WHOLE_ROW)
        assert packed_bytes(blockwise, width) == packed_width(width, BLOCK)
    assert arena_bytes_per_rank(recipe(), 1.125) < arena_bytes_per_rank(blockwise, 1.125)
