"""Calibration on tiny shapes on the CPU: kernels, links of two ranks that send nothing; without a GPU it is refused."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_moe.cli import main
from titan_moe.plan.cost.rates_file import NAMES, Measurement, read_rates
from titan_moe.profile.calibration import TINY, calibrate
from titan_moe.profile.calibration_progress import Progress, Task
from titan_moe.profile.link_calibration import measure_links, messages_of

CPU = torch.device("cpu")


def test_tiny_shapes_make_a_table_that_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = list[str]()
    tables.append(calibrate(CPU, 60.0, TINY, save=tables.append))
    file = tmp_path / "rates.toml"
    for table in tables:  # a run may be killed after each
        file.write_text(table.replace('device = "CPU"', 'device = "NVIDIA H100"'), "utf-8")
        _, rates = read_rates(file)
        assert ("INCOMPLETE" in table) == (table != tables[-1])
    assert rates.is_measured and not rates.node_link_is_measured
    assert 0 < rates.dense < 1e14
    lines = capsys.readouterr().err.splitlines()
    for name in ("memory", "dense", "grouped", "attention_forward", "attention_backward"):
        assert tables[-1].count(f'rate = "{name}"') == 1
        assert sum(name in line for line in lines) == 1
    assert [table.count("[[measured]]") for table in tables] == [1, 2, 4, 5, 5]


def test_what_fails_or_has_no_time_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(_: float) -> list[Measurement]:
        raise RuntimeError("no kernel image\nmore")

    progress = Progress(CPU, 50.0, time.monotonic(), lambda _: None)
    progress.run(Task("a copy", 1.0, fails, "copy"))
    progress.run(Task("experts", 1e3, fails, "experts"))
    progress.took["experts"] = 1.0  # no longer cold
    progress.run(Task("more experts", 1e3, fails, "experts"))
    assert progress.left_out[0] == progress.left_out[2].replace("more experts", "a copy")
    assert progress.left_out[0] == "a copy: RuntimeError: no kernel image"
    assert progress.left_out[1] == "experts: it may take 1000 s, and 50 of 50 are left"
    assert progress.timed_ms == 100
    progress.began -= 26
    assert progress.timed_ms == 25
    assert capsys.readouterr().err.count("left out: ") == progress.table(is_complete=True).count("# left out: ") == 3


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
        for seconds in (60.0, 1e-9):
            progress = Progress(CPU, seconds, time.monotonic(), lambda _: None)
            measure_links(progress, 64, 16, 4)
            number = len(list(messages_of(CPU, 64, 16, 4)))
            assert [len(progress.measured), len(progress.left_out)] == ([number, 0] if seconds > 1 else [0, number])
            if progress.measured:
                assert {it.rate for it in progress.measured} == rates <= set(NAMES)
                assert all(it.value > 0 and it.shape["ranks"] == 2 for it in progress.measured)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_a_gpu_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 2
    assert "measures a GPU, and torch finds none here" in capsys.readouterr().err
    assert main(["calibrate", "--out=/no/such/folder/rates.toml"]) == 2
    assert "/no/such/folder is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["calibrate", "--seconds=soon"])
