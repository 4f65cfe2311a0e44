"""Tables of measured kernels: a round trip, and which entry speaks for which shape."""

from pathlib import Path

import pytest

from titan_moe.config import RecipeError
from titan_moe.plan.kernel_table import (
    SHIPPED_TABLES,
    KernelTable,
    Measured,
    measured_devices,
    read_table,
    table_name,
    tables_for,
    write_table,
)

SHAPE = {"rows": 1000, "choices": 2, "slots": 2000, "experts": 4, "width": 64, "hidden": 32}


def measured(ms: dict[str, float] | None = None, **sizes: int) -> Measured:
    return Measured("experts", SHAPE | sizes, ms or {"fused": 1.5, "grouped_mm": 2.0}, "2.13.0", "3.7.1", "2026-11-21")


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    shape = {"tokens": 8, "query_heads": 4, "key_heads": 2, "head_width": 6, "norm": 'a "b"', "pairs": "halves"}
    rotary = Measured("rotary", shape, {"torch": 0.1}, "2", "3", "2026")
    table = KernelTable('a "device"', (measured(), measured(width=128), rotary))
    write_table(tmp_path / "new" / "table.toml", table)
    assert read_table(tmp_path / "new" / "table.toml") == table


def test_new_measurements_replace_those_of_the_same_shape() -> None:
    old = KernelTable("gpu", (measured(), measured(hidden=48)))
    again, other = measured({"fused": 9.0, "grouped_mm": 1.0}), measured(slots=500)
    merged = old.merged([again, other])
    assert merged.device == "gpu" and len(merged.measured) == 3
    assert again in merged.measured and other in merged.measured and measured() not in merged.measured
    assert merged.merged([again]) == merged, "the order of a table does not depend on its history"


def test_the_nearest_load_within_a_factor_of_two_speaks() -> None:
    table = KernelTable("gpu", (measured(slots=2000), measured(slots=5000)))
    for slots, nearest in ((2000, 2000), (1000, 2000), (999, None), (3000, 2000), (3300, 5000), (10_000, 5000),
                           (10_001, None)):  # fmt: skip
        found = table.find("experts", SHAPE | {"slots": slots})
        assert (found and found.shape["slots"]) == nearest
    assert table.find("experts", SHAPE | {"slots": 4000, "experts": 8, "rows": 1}), "the load is slots an expert"
    assert table.find("experts", SHAPE | {"width": 65}) is None
    assert table.find("head", {"tokens": 5, "chunk": 4, "width": 64, "vocabulary": 9}) is None


def test_of_one_load_the_nearest_rows_speak() -> None:
    table = KernelTable("gpu", (measured(rows=1000), measured(rows=5000)))
    for rows in (1000, 5000):
        found = table.find("experts", SHAPE | {"rows": rows})
        assert found is not None and found.shape["rows"] == rows


def test_a_table_of_the_users_own_is_asked_first(cache: Path) -> None:
    own = KernelTable("NVIDIA H200", (measured(),))
    write_table(cache / "nvidia_h200.toml", own)
    first, second = tables_for("NVIDIA H200")
    assert first == own and second == read_table(SHIPPED_TABLES / "nvidia_h200.toml")
    write_table(cache / "some_gpu.toml", KernelTable("Some GPU"))
    assert measured_devices() == ["NVIDIA H200", "Some GPU"]


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3", "CPU", ""])
def test_a_relative_is_another_device(name: str) -> None:
    assert tables_for(name) == []


def test_shipped_tables_are_found_by_their_device() -> None:
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
def test_what_is_no_table_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.toml").write_text(text)
    with pytest.raises(RecipeError, match="broken.toml is no table of measured kernels .*titan-moe tune"):
        read_table(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    "broken", [measured(slots=0), measured({"fused": 0.0}), Measured("experts", {}, {}, "", "", "")]
)
def test_impossible_measurements_are_refused(tmp_path: Path, broken: Measured) -> None:
    write_table(tmp_path / "table.toml", KernelTable("gpu", (broken,)))
    with pytest.raises(RecipeError, match="no table"):
        read_table(tmp_path / "table.toml")
