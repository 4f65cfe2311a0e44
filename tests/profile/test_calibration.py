"""Calibration on tiny shapes on the CPU: kernels, links of two ranks that send nothing; without a GPU it is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_moe.cli import main
from titan_moe.plan.cost.rates_file import NAMES, read_rates
from titan_moe.profile.calibration import TINY, calibrate
from titan_moe.profile.link_calibration import measure_links

CPU = torch.device("cpu")


def test_tiny_shapes_make_a_table(tmp_path: Path) -> None:
    table = calibrate(CPU, TINY).replace('device = "CPU"', 'device = "NVIDIA H100"')
    file = tmp_path / "rates.toml"
    file.write_text(table, "utf-8")
    _, rates = read_rates(file)
    assert rates.is_measured and not rates.node_link_is_measured
    assert 0 < rates.dense < 1e14
    for name in ("memory", "dense", "grouped", "attention_forward", "attention_backward"):
        assert table.count(f'rate = "{name}"') == 1


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """One of two ranks whose messages are not sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_links_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for of_node, rates in (("2", {"link", "collective_rows", "split_collectives"}), ("1", {"node_link"})):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", of_node)
        measured = list(measure_links(CPU, 64, 16, 4))
        assert {it.rate for it in measured} == rates <= set(NAMES)
        assert all(it.value > 0 and it.shape["ranks"] == 2 for it in measured)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_a_gpu_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 2
    assert "measures a GPU, and torch finds none here" in capsys.readouterr().err
