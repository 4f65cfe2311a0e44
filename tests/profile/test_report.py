"""The report: its numbers, its charts, and no external resources."""

import re
from dataclasses import replace
from types import ModuleType

import pytest

from titan_moe.plan.choice.hardware import find_hardware
from titan_moe.plan.cost.roofline import RegionWork
from titan_moe.profile import chart
from titan_moe.profile.chart import area_curve, downsample, stacked_bar
from titan_moe.profile.compile_trace import CompiledFunction, CompileReport
from titan_moe.profile.report import TracedRun, TracedSteps, render
from titan_moe.profile.trace_parsing import read_events

NOTHING = CompileReport([], {}, [])


def traced_run(hardware_name: str) -> TracedRun:
    """1e9 FLOPs of experts in 0.2 ms, and 2.4 MB of rows in 0.24 ms."""
    work = {
        "experts": RegionWork(flops=1e9),
        "dispatch": RegionWork(wire_bytes=2.4e6),
        "optimizer": RegionWork(memory_bytes=1.75e6),
    }
    return TracedRun("<small> on 1 x GPU", work, 2e9, 4096, find_hardware(hardware_name), TracedSteps(4, "launched"))


def rows_of(report: str) -> dict[str, list[str]]:
    """First cell -> the other cells of a row, of all tables."""
    rows = re.findall(r"<tr>(<td>.*?)</tr>", report)
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    return {first: rest for first, *rest in cells}


def test_report_compares_parts_with_their_roofline(trace_events: ModuleType) -> None:
    report = render(read_events(trace_events.STEP_ON_GPU), traced_run("NVIDIA H200"), NOTHING)
    rows = rows_of(report)
    assert rows["experts"] == ["0.200", "0.000", "", "20.0 %", "1 GFLOP", "5 TFLOP/s", "0.00101", "198"]
    assert rows["dispatch"] == ["0.000", "0.000", "0.240 (0.140)", "14.0 %", "2.4 MB", "10 GB/s", "0.00533", "45"]
    assert rows["optimizer"][4:6] == ["1.75 MB", "10 GB/s"]
    assert "<b>0.2 %</b>MFU" in report and "<b>0.21 ms · 21.0 %</b>host-bound" in report
    assert "Nothing was compiled" in report


def test_report_has_the_speed_without_the_profiler_and_parts_that_add_up_to_it(trace_events: ModuleType) -> None:
    timeline = read_events(trace_events.REPLAYED_STEPS)
    steps = TracedSteps(20, "replayed", step_ms=0.15, num_timed=10)
    report = render(timeline, replace(traced_run("NVIDIA H200"), steps=steps), NOTHING)
    assert "Steps 20 to 20 on rank 0, averaged, replayed from a CUDA graph" in report
    assert "a step takes 0.15 ms, the mean of 10 steps before them; under it, it took 0.30 ms" in report
    assert "<b>0.15 ms</b>step" in report and "<b>27,306,667</b>tokens/s" in report
    parts = {name: cells for name, cells in rows_of(report).items() if len(cells) > 4}
    idle_ms = float(re.findall(r"<b>([\d.]+) ms · [\d.]+ %</b>idle", report)[0])
    assert sum(float(cells[0]) + float(cells[1]) for cells in parts.values()) + idle_ms == pytest.approx(0.15, abs=1e-3)


def test_report_of_an_unknown_device_has_no_roofline(trace_events: ModuleType) -> None:
    report = render(read_events(trace_events.STEP_ON_GPU), traced_run("CPU"), NOTHING)
    assert rows_of(report)["experts"][4:] == ["1 GFLOP", "5 TFLOP/s"]
    assert "MFU" not in report and "roofline ms" not in report


def test_report_has_no_external_resources_and_escapes_names(trace_events: ModuleType) -> None:
    kernel = trace_events.kernel(1, "<script>alert(1)</script>" + "x" * 500, 0, 5)
    report = render(read_events([*trace_events.STEP_ON_GPU, kernel]), traced_run("CPU"), NOTHING)
    assert not re.search(r"<script|href=|src=|<link|@import|url\(", report)
    assert "&lt;script&gt;" in report and "x" * 200 not in report and "&lt;small&gt; on 1 x GPU" in report


def test_report_lists_compilations_with_their_reasons(trace_events: ModuleType) -> None:
    front = CompiledFunction("front (layers/block.py:30)", 1.5, 0.5, num_graphs=2, reasons=["size 3 != 4"])
    compiled = CompileReport([front], {"print": 2}, [500.0, 5e6])
    report = render(read_events(trace_events.STEP_ON_GPU, unix_offset_us=0.0), traced_run("CPU"), compiled)
    assert "1 functions in 2.0 s; 2 graph breaks, 1 recompiles, 1 compilations during the traced steps." in report
    assert rows_of(report)["front (layers/block.py:30)"] == ["2", "1.50", "0.50"]
    assert "size 3 != 4" in report and "graph break, 2 times: print" in report


def test_downsample_keeps_extremes() -> None:
    points = [(float(x), 0.0) for x in range(10_000)]
    points[4321] = (4321.0, 9.0)
    points[77] = (77.0, -5.0)
    kept = downsample(points)
    assert len(kept) <= 481 and {points[4321], points[77]} <= set(kept) and kept == sorted(kept)
    assert downsample(points[:10]) == points[:10]


def test_stacked_bar_is_to_scale() -> None:
    bar = stacked_bar([("a", 1.0, "red"), ("b", 3.0, "blue")])
    assert re.findall(r"width:([\d.]+)%", bar) == ["25.000", "75.000"]


def test_area_curve_is_to_scale() -> None:
    curve = area_curve([(0.0, 0.0), (5.0, 8.0), (10.0, 4.0)], unit_x="ms", unit_y="GiB")
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", curve)]
    low, high, middle = max(heights), min(heights), heights[-3]
    assert middle == pytest.approx((low + high) / 2, abs=0.1)
    assert "10 ms" in curve


MEMORY_CURVES = {
    "GPU": [0.0, 76.3, 139.8, 12.25],
    "CPU, below the start of the trace": [0.0, 0.031, -0.0123, 0.002],
    "many points": [float(7 * index % 1000) / 10 for index in range(5000)],
}


@pytest.mark.parametrize("sizes_gib", MEMORY_CURVES.values(), ids=MEMORY_CURVES)
def test_report_memory_curve_is_in_gib_and_inside_the_drawing_area(
    trace_events: ModuleType, sizes_gib: list[float]
) -> None:
    memory = [(10.0 * index, round(size * 2**30)) for index, size in enumerate(sizes_gib)]
    timeline = replace(read_events(trace_events.STEP_ON_GPU), memory=memory)
    report = render(timeline, traced_run("NVIDIA H200"), NOTHING)
    svg = report[report.index("<svg") : report.index("</svg>")]
    assert f"Peak {max(sizes_gib):,.4g} GiB" in report and "MiB" not in report
    left, right, top, bottom = chart.LEFT, chart.RIGHT, chart.TOP, chart.BOTTOM
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", svg)]
    assert len(points) >= 2 * len(sizes_gib[:240])
    assert all(left <= x <= right and top <= y <= bottom for x, y in points)
    assert {min(y for _, y in points), max(y for _, y in points)} == {top, bottom}, "the curve fills the area"
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"( text-anchor="end")?>([^<]*)</text>', svg)
    y_labels = [text for x, _, _, text in texts if float(x) < left]
    expected = {min(0.0, *sizes_gib), 0.0, max(sizes_gib)}
    assert {f"{size:.3g} GiB" for size in expected} <= set(y_labels)
    assert all(text.endswith(" GiB") for text in y_labels) and len(texts) == len(y_labels) + 2
    for x, y, is_end, text in texts:  # at most 7 pixels a character, at 11 pixels a line
        start = float(x) - 7 * len(text) if is_end else float(x)
        assert 0 <= start and start + 7 * len(text) <= chart.WIDTH and 11 <= float(y) <= chart.HEIGHT
