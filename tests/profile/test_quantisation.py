"""Kernels that quantise are a part of their own, in the breakdown and in the report."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from titan_moe.profile.breakdown import break_down, top_kernels
from titan_moe.profile.chart import PALETTE
from titan_moe.profile.compile_trace import CompileReport
from titan_moe.profile.quantisation import FP8_KERNELS, is_quantisation
from titan_moe.profile.report import TITLES, TracedRun, TracedSteps, render
from titan_moe.profile.trace_parsing import read_events

GEMMS = {"_weight_grad_kernel", "_block_mm_kernel", "_block_weight_grad_kernel"}
KERNELS = Path(__file__).parents[2] / "titan_moe" / "kernels"
ROWWISE_CAST = "triton_red_fused__to_copy_abs_amax_clamp_div_exp2_floor_log2_mul_reciprocal_t_3"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_quantize_rows_kernel", True),
        ("_fp8_swiglu_kernel", True),
        ("_swiglu_backward_kernel", False),  # in bf16
        ("_weight_grad_kernel", False),
        (ROWWISE_CAST, True),
        ("triton_poi_fused__to_copy_clamp_mul_reciprocal_t_2", True),
        ("triton_red_fused_abs_max_0", True),
        ("triton_per_fused__to_copy_abs_clamp_div_max_mul_reciprocal_t_12", True),
        ("triton_red_fused__fused_rms_norm__to_copy_abs_amax_clamp_mul_1", False),
        ("triton_red_fused__to_copy_abs_amax_clamp_mul_silu_split_1", False),
        ("triton_poi_fused__to_copy_t_0", False),
        ("triton_poi_fused__to_copy_mul_4", False),
        ("triton_per_fused_amax_exp_sub_sum_1", False),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32", False),
    ],
)
def test_quantisation_is_known_by_the_name_of_its_kernel(name: str, expected: bool) -> None:
    assert is_quantisation(name) == expected


def kernels_in(*files: Path) -> list[str]:
    return [
        name
        for file in files
        for name in re.findall(r"^def (_\w+_kernel)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def test_quantisation_has_all_kernels_of_formats_and_no_other() -> None:
    folders = "experts/fp8", "formats", "linear"
    quantising = {file for folder in folders for file in (KERNELS / folder).glob("*.py")}
    others = kernels_in(*(set(KERNELS.rglob("*.py")) - quantising))
    assert set(kernels_in(*quantising)) == FP8_KERNELS | GEMMS
    assert FP8_KERNELS.isdisjoint(others) and others


def test_report_has_a_row_of_quantisation(trace_events: ModuleType) -> None:
    events = [
        trace_events.event("user_annotation", "ProfilerStep#4", 0, 1000),
        trace_events.part("attention", 10, 100),
        trace_events.launch(1, 20, 30),
        trace_events.launch(2, 40, 50),
        trace_events.part("experts", 110, 300),
        trace_events.forward("_Fp8ExpertMLP", 120, 290, sequence=5),
        trace_events.launch(3, 130, 140),
        trace_events.launch(4, 150, 160),
        trace_events.launch(5, 170, 180),
        trace_events.node("_Fp8ExpertMLPBackward", 400, 500, sequence=5),
        trace_events.launch(6, 410, 420, thread=2),
        trace_events.launch(7, 430, 440, thread=2),
        trace_events.kernel(1, ROWWISE_CAST, 50, 90),
        trace_events.kernel(2, "gemm", 100, 200),
        trace_events.kernel(3, "_quantize_rows_kernel", 200, 230),
        trace_events.kernel(4, "_gather_mm_kernel", 230, 330),
        trace_events.kernel(5, "_fp8_swiglu_kernel", 330, 350),
        trace_events.kernel(6, "_fp8_swiglu_backward_kernel", 500, 550),
        trace_events.kernel(7, "_weight_grad_kernel", 550, 700),
    ]
    timeline = read_events(events)
    parts = break_down(timeline).parts
    assert {part: (time.forward_ms, time.backward_ms) for part, time in parts.items()} == {
        "attention": pytest.approx((0.100, 0)),
        "experts": pytest.approx((0.100, 0.150)),
        "quantisation": pytest.approx((0.090, 0.050)),
    }
    assert {it.name: it.part for it in top_kernels(timeline)}["_fp8_swiglu_kernel"] == "quantisation"
    report = render(timeline, TracedRun("run", {}, 1e9, 1, None, TracedSteps(4, "launched")), CompileReport([], {}, []))
    assert "<td>quantisation</td><td>0.090</td><td>0.050</td><td></td><td>14.0 %</td>" in report
    assert "Quantisation is apart from the part that needs it" in report
    plain = render(
        read_events(trace_events.STEP_ON_GPU),
        TracedRun("run", {}, 1e9, 1, None, TracedSteps(4, "launched")),
        CompileReport([], {}, []),
    )
    assert "uantisation" not in plain


def test_every_part_has_a_colour_of_its_own() -> None:
    assert len(set(PALETTE)) == len(PALETTE) == len(TITLES)
