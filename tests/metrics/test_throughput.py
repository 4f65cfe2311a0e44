"""Throughput, with a clock that the test sets."""

import pytest
import torch

from titan_moe.metrics import throughput as module
from titan_moe.metrics.throughput import Throughput, peak_memory_gib


class Clock:
    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_throughput_of_intervals(clock):
    throughput = Throughput(2e9, torch.device("cpu"), num_ranks=4)
    clock.now += 7.0
    throughput.start()
    clock.now += 50.0  # the first step compiles
    throughput.count(800)
    assert throughput.measure()["step_ms"] == 50_000
    for _ in range(5):
        clock.now += 0.5
        throughput.count(800)
    measured = throughput.measure()
    assert measured["tokens_per_second_per_gpu"] == pytest.approx(5 * 800 / 2.5 / 4)
    assert measured["tflops_per_gpu"] == pytest.approx(400 * 2e9 / 1e12)
    assert measured["step_ms"] == pytest.approx(500)
    assert measured["mfu"] is None  # the peak of a CPU is unknown


def test_throughput_excludes_pauses(clock):
    throughput = Throughput(1.0, torch.device("cpu"), num_ranks=1)
    clock.now += 1.0
    throughput.count(10)
    with throughput.paused():
        clock.now += 30.0
    with pytest.raises(RuntimeError), throughput.paused():
        clock.now += 30.0
        raise RuntimeError
    assert throughput.measure()["tokens_per_second_per_gpu"] == pytest.approx(10.0)


@pytest.mark.parametrize(("name", "mfu"), [("NVIDIA H200", 0.5), ("NVIDIA H100 80GB HBM3", 0.5), ("Unheard Of", None)])
def test_throughput_mfu_is_a_share_of_the_known_peak(clock, monkeypatch, name, mfu):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    throughput = Throughput(989e12 / 2000, torch.device("cuda", 0), num_ranks=1)
    clock.now += 1.0
    throughput.count(1000)
    assert throughput.measure()["mfu"] == (None if mfu is None else pytest.approx(mfu))


def test_peak_memory_of_a_cpu_process_is_its_resident_peak():
    assert 0.05 < peak_memory_gib(torch.device("cpu")) < 1000
