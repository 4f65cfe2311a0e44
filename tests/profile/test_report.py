"""The page stands alone and says what the numbers are."""

import re
from types import ModuleType

import pytest

from titan_moe.plan.hardware import find_hardware
from titan_moe.plan.roofline import Work
from titan_moe.profile.chart import area_curve, stacked_bar, thinned
from titan_moe.profile.compile_trace import CompiledPiece, CompileReport
from titan_moe.profile.report import Subject, render
from titan_moe.profile.trace_parsing import read_events

NOTHING = CompileReport([], {}, [])


def subject(hardware_name: str) -> Subject:
    """1e9 FLOPs of experts in a fifth of a millisecond; 2.4 MB of rows in 0.24 ms."""
    work = {"experts": Work(flops=1e9), "dispatch": Work(wire_bytes=2.4e6), "optimizer": Work(memory_bytes=1.75e6)}
    return Subject("<small> on 1 x GPU", work, 2e9, 4096, find_hardware(hardware_name))


def rows_of(page: str) -> dict[str, list[str]]:
    """First cell -> the cells after it, of all tables."""
    rows = re.findall(r"<tr>(<td>.*?)</tr>", page)
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    return {first: rest for first, *rest in cells}


def test_parts_stand_beside_their_floor(by_hand: ModuleType) -> None:
    page = render(read_events(by_hand.STEP_ON_GPU), subject("NVIDIA H200"), NOTHING)
    rows = rows_of(page)
    assert rows["experts"] == ["0.200", "0.000", "", "20.0 %", "1 GFLOP", "5 TFLOP/s", "0.00101", "198"]
    assert rows["dispatch"] == ["0.000", "0.000", "0.240 (0.140)", "14.0 %", "2.4 MB", "10 GB/s", "0.00533", "45"]
    assert rows["optimizer"][4:6] == ["1.75 MB", "10 GB/s"]
    assert "<b>0.2 %</b>MFU" in page and "<b>0.21 ms · 21.0 %</b>host-bound" in page
    assert "Nothing was compiled" in page


def test_an_unknown_device_has_no_floor(by_hand: ModuleType) -> None:
    page = render(read_events(by_hand.STEP_ON_GPU), subject("CPU"), NOTHING)
    assert rows_of(page)["experts"][4:] == ["1 GFLOP", "5 TFLOP/s"]
    assert "MFU" not in page and "floor ms" not in page


def test_the_page_needs_nothing_else_and_trusts_no_name(by_hand: ModuleType) -> None:
    evil = by_hand.kernel(1, "<script>alert(1)</script>" + "x" * 500, 0, 5)
    page = render(read_events([*by_hand.STEP_ON_GPU, evil]), subject("CPU"), NOTHING)
    assert not re.search(r"<script|href=|src=|<link|@import|url\(", page)
    assert "&lt;script&gt;" in page and "x" * 200 not in page and "&lt;small&gt; on 1 x GPU" in page


def test_compilations_are_listed_with_their_reasons(by_hand: ModuleType) -> None:
    piece = CompiledPiece("front (layers/block.py:30)", 1.5, 0.5, num_graphs=2, reasons=["size 3 != 4"])
    compiled = CompileReport([piece], {"print": 2}, [500.0, 5e6])
    page = render(read_events(by_hand.STEP_ON_GPU, unix_offset_us=0.0), subject("CPU"), compiled)
    assert "1 pieces in 2.0 s; 2 graph breaks, 1 recompiles, 1 compilations during the traced steps." in page
    assert rows_of(page)["front (layers/block.py:30)"] == ["2", "1.50", "0.50"]
    assert "size 3 != 4" in page and "graph break, 2 times: print" in page


def test_a_thinned_curve_keeps_its_extremes() -> None:
    points = [(float(x), 0.0) for x in range(10_000)]
    points[4321] = (4321.0, 9.0)
    points[77] = (77.0, -5.0)
    kept = thinned(points)
    assert len(kept) <= 481 and {points[4321], points[77]} <= set(kept) and kept == sorted(kept)
    assert thinned(points[:10]) == points[:10]


def test_drawings_are_to_scale() -> None:
    bar = stacked_bar([("a", 1.0, "red"), ("b", 3.0, "blue")])
    assert re.findall(r"width:([\d.]+)%", bar) == ["25.000", "75.000"]
    curve = area_curve([(0.0, 0.0), (5.0, 8.0), (10.0, 4.0)], unit_x="ms", unit_y="MiB")
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", curve)]
    low, high, middle = max(heights), min(heights), heights[-3]
    assert middle == pytest.approx((low + high) / 2, abs=0.1)
    assert "8 MiB" in curve and "10 ms" in curve
