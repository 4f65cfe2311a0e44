"""Calibration of a GPU: all kernels run, and the rates are near those of the shipped table. One shape each."""

from pathlib import Path

import pytest
import torch

from titan_moe.plan.choice.hardware import find_hardware
from titan_moe.plan.cost.rates import rates_of
from titan_moe.plan.cost.rates_file import read_rates
from titan_moe.profile.calibration import FULL, calibrate

pytestmark = pytest.mark.gpu


def test_rates_are_near_those_of_the_table(tmp_path: Path) -> None:
    name = torch.cuda.get_device_name()
    if find_hardware(name) is None:
        pytest.skip(f"{name} has no data sheet here")
    shapes = FULL._replace(widths=FULL.widths[2:3], experts=FULL.experts[:1], lengths=(16_384,))
    file = tmp_path / "rates.toml"
    tables = list[str]()
    file.write_text(calibrate(torch.device("cuda"), 120.0, shapes, save=tables.append), "utf-8")
    assert "left out" not in file.read_text("utf-8")
    assert len(tables) == 6  # a copy, a linear and experts in two formats, attention
    _, rates = read_rates(file)
    shipped = rates_of(name)
    assert shipped is not None
    for rate in ("dense", "grouped", "memory", "attention_forward", "attention_backward"):
        assert 0.6 < getattr(rates, rate) / getattr(shipped, rate) < 1.6, rate
