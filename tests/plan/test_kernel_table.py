"""Tables of measured kernels: a round trip, and which entry decides at which shape."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.config import RecipeError
from titan_moe.plan.hardware import Capability
from titan_moe.plan.kernel_table import (
    SHIPPED_TABLES,
    KernelTable,
    Measured,
    Nearest,
    find_nearest,
    measured_devices,
    read_table,
    table_name,
    tables_for,
    write_table,
)

SHAPE = {"rows": 1000, "choices": 2, "slots": 2000, "experts": 4, "width": 64, "hidden": 32}


def measured(ms: dict[str, float] | None = None, **sizes: int) -> Measured:
    return Measured("experts", SHAPE | sizes, ms or {"fused": 1.5, "grouped_mm": 2.0}, "2.13.0", "3.7.1", "2026-11-21")


def test_kernel_table_is_read_as_written(tmp_path: Path) -> None:
    sizes = {"tokens": 8, "sequences": 1, "query_heads": 4, "key_heads": 2, "head_width": 6}
    rotary = Measured("rotary", {**sizes, "norm": 'a "b"', "pairs": "halves"}, {"torch": 0.1}, "2", "3", "2026")
    in_formats = replace(measured({"compute": 2.0, "fp8_rowwise (wgrad compute)": 1.0}), operation="experts_in_formats")
    table = KernelTable('a "device"', (measured(), measured(width=128), in_formats, rotary))
    write_table(tmp_path / "new" / "table.toml", table)
    assert read_table(tmp_path / "new" / "table.toml") == table


def test_kernel_table_merge_replaces_equal_shapes() -> None:
    old = KernelTable("gpu", (measured(), measured(hidden=48)))
    again, other = measured({"fused": 9.0, "grouped_mm": 1.0}), measured(slots=500)
    merged = old.merged([again, other])
    assert merged.device == "gpu" and len(merged.measured) == 3
    assert again in merged.measured and other in merged.measured and measured() not in merged.measured
    assert merged.merged([again]) == merged, "the order of a table does not depend on its history"


def nearest(*tables: KernelTable, device: str = "gpu", **sizes: int) -> Nearest:
    found = find_nearest(tables, device, "experts", SHAPE | sizes)
    assert found is not None
    return found


@pytest.mark.parametrize(("slots", "expected"), [(2000, 2000), (1, 2000), (3100, 2000), (3200, 5000), (10**9, 5000)])
def test_find_nearest_at_any_distance(slots: int, expected: int) -> None:
    found = nearest(KernelTable("gpu", (measured(slots=2000), measured(slots=5000))), slots=slots)
    assert found.measured.shape["slots"] == expected
    assert found.ratio == pytest.approx(max(slots / expected, expected / slots))


@pytest.mark.parametrize(("ratio", "shown"), [(1.25, "x1.25"), (99.4, "x99.4"), (223_948.2, "x223,948")])
def test_distance_in_words(ratio: float, shown: str) -> None:
    assert Nearest(measured(), "gpu", ratio).distance == f"the nearest shape, {shown} away"


def test_find_nearest_counts_all_sizes() -> None:
    table = KernelTable("gpu", (measured(width=128, hidden=64), measured(rows=300, experts=5)))
    assert nearest(table, width=128).measured is table.measured[0]
    assert nearest(table).measured is table.measured[0], "x4 is nearer than x4.2"
    assert nearest(table, rows=900).measured is table.measured[1]
    assert find_nearest([table], "gpu", "head", {"tokens": 5}) is None, "another operation says nothing"


def test_find_nearest_leaves_out_what_is_not_comparable() -> None:
    def head(chunk: int) -> Measured:
        shape = {"tokens": 8192, "chunk": chunk, "width": 64, "vocabulary": 1000}
        return Measured("head", shape, {"torch": 1.0}, "", "", "")

    chunked, whole = head(4096), head(0)
    assert find_nearest([KernelTable("gpu", (chunked,))], "gpu", "head", whole.shape) is None
    assert find_nearest([KernelTable("gpu", (whole,))], "gpu", "head", chunked.shape) is None
    both = KernelTable("gpu", (chunked, whole))
    assert find_nearest([both], "gpu", "head", whole.shape) == Nearest(whole, "gpu", 1.0)
    in_fp64 = Measured("gradients", {"elements": 8, "dtypes": "bf16 to fp64"}, {"torch": 1.0}, "", "", "")
    assert find_nearest([KernelTable("gpu", (in_fp64,))], "gpu", "gradients", {**in_fp64.shape, "dtypes": ""}) is None


def test_find_nearest_prefers_the_first_table_and_the_same_gpu() -> None:
    first, second = (KernelTable("gpu", (measured({"fused": ms}),)) for ms in (1.0, 2.0))
    assert nearest(first, second).measured is first.measured[0]
    relative = KernelTable("relative", (measured(),))
    assert nearest(relative, first) == Nearest(first.measured[0], "gpu", 1.0)
    assert nearest(relative, first, slots=2000 * 9).device == "gpu"
    far = KernelTable("gpu", (measured(slots=2000 * 11),))
    assert nearest(relative, far) == Nearest(relative.measured[0], "relative", 1.0)


def test_kernel_tables_of_the_user_come_first(cache: Path) -> None:
    own, another = KernelTable("NVIDIA H200", (measured(),)), KernelTable("Some GPU")
    write_table(cache / "nvidia_h200.toml", own)
    write_table(cache / "some_gpu.toml", another)
    assert tables_for("NVIDIA H200") == [own, read_table(SHIPPED_TABLES / "nvidia_h200.toml")]
    assert tables_for("Some GPU") == [another]
    assert measured_devices() == ["NVIDIA H200", "Some GPU"]


@pytest.mark.parametrize(
    ("name", "capability", "has_tables"),
    [
        ("NVIDIA H100 80GB HBM3", None, True),
        ("NVIDIA GH200 480GB", None, True),
        ("NVIDIA X100", (9, 0), True),
        ("NVIDIA X100", (10, 0), False),
        ("NVIDIA X100", None, False),
        ("NVIDIA A100-SXM4-80GB", None, False),
        ("CPU", None, False),
        ("", None, False),
    ],
)
def test_kernel_tables_of_an_architecture(name: str, capability: Capability | None, has_tables: bool) -> None:
    assert [table.device for table in tables_for(name, capability)] == ["NVIDIA H200"] * has_tables


def test_kernel_tables_shipped_are_found_by_device() -> None:
    for path in SHIPPED_TABLES.glob("*.toml"):
        assert path.name == table_name(read_table(path).device)


@pytest.mark.parametrize(
    "text",
    [
        "device = 5",
        "measured = []",
        'device = "gpu"\nmeasured = [1]',
        'device = "gpu"\n[[measured]]\noperation = "experts"',
        'device = "gpu"\nother = 1',
        "device = ",
    ],
)
def test_kernel_table_error_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.toml").write_text(text)
    with pytest.raises(RecipeError, match="broken.toml is no table of measured kernels .*titan-moe tune"):
        read_table(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    "broken", [measured(slots=-1), measured({"fused": 0.0}), Measured("experts", {}, {}, "", "", "")]
)
def test_kernel_table_refuses_impossible_measurements(tmp_path: Path, broken: Measured) -> None:
    write_table(tmp_path / "table.toml", KernelTable("gpu", (broken,)))
    with pytest.raises(RecipeError, match="no table"):
        read_table(tmp_path / "table.toml")
