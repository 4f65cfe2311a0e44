"""Captured functions, on the CPU with a recorder that calls the function instead of replaying kernels."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_moe.compile.cudagraph import Captured, Recorder, Recording, idle_pool_bytes

DEVICE = torch.device("cuda")


class Repeater:
    """Behaves like a CUDA graph: a capture computes nothing, every replay overwrites the same outputs."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def record(self, function: Callable[[], Tensor]) -> Recording:
        self.log.append("record")
        output = torch.full_like(function(), float("nan"))

        def replay() -> None:
            self.log.append("replay")
            output.copy_(function())

        return Recording(replay, lambda: self.log.append("release"), output)


def scaled_sum(pair: tuple[Tensor, Tensor | None], scale: Tensor) -> Tensor:
    return pair[0].sum() * scale


def test_captured_is_recorded_once_and_replayed_on_new_inputs() -> None:
    repeater: Any = Repeater()
    captured = Captured(scaled_sum, repeater)
    for step in range(3):
        x, scale = torch.full((3,), float(step)), torch.tensor(2.0)
        assert captured((x, None), scale).item() == 6 * step
    assert repeater.log == ["record", "replay", "replay", "replay"]


def test_captured_outputs_are_overwritten_by_each_replay() -> None:
    captured = Captured(scaled_sum, Repeater())
    first = captured((torch.ones(3), None), torch.tensor(1.0))
    second = captured((torch.zeros(3), None), torch.tensor(1.0))
    assert first is second and first.item() == 0


def test_captured_release_frees_inputs_and_leads_to_a_new_recording() -> None:
    repeater: Any = Repeater()
    captured = Captured(scaled_sum, repeater)
    captured.release()  # before any capture
    captured((torch.ones(3), None), torch.tensor(1.0))
    assert captured.num_recordings == 1
    buffer = weakref.ref(captured.inputs[0])
    captured.release()
    assert buffer() is None
    assert captured((torch.ones(3), None), torch.tensor(2.0)).item() == 6
    assert captured.num_recordings == 2
    assert repeater.log == ["record", "replay", "release", "record", "replay"]


@pytest.mark.parametrize(
    "other", [(torch.ones(4), None), (torch.ones(3, dtype=torch.float64), None), (torch.ones(3), torch.ones(1))]
)
def test_captured_other_shapes_are_refused(other: tuple[Tensor, Tensor | None]) -> None:
    captured = Captured(scaled_sum, Repeater())
    captured((torch.ones(3), None), torch.tensor(1.0))
    with pytest.raises(ValueError, match="shapes must not change"):
        captured(other, torch.tensor(1.0))


def test_captured_failure_names_the_reason_and_the_recipe_field() -> None:
    class Refuses(Repeater):
        def record(self, function: Callable[[], Tensor]) -> Recording:
            try:
                raise RuntimeError("operation not permitted when stream is capturing")
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")

    captured = Captured(scaled_sum, Refuses())
    with pytest.raises(RuntimeError, match=r'the step cannot.*not permitted.*\n.*compile.cudagraph = "off"'):
        captured((torch.ones(3), None), torch.tensor(1.0))


def test_idle_bytes_are_those_of_the_pools_of_graphs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        {"device": device, "segment_pool_id": pool, "total_size": 10, "allocated_size": allocated}
        for device, pool, allocated in ((0, (0, 0), 1), (0, (0, 2), 3), (0, [1, 0], 6), (1, (0, 3), 0))
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces: segments)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert idle_pool_bytes(torch.device("cuda", 0)) == (10 - 3) + (10 - 6)
    assert idle_pool_bytes(torch.device("cpu")) == 0
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert idle_pool_bytes(torch.device("cuda", 0)) == 0


@pytest.mark.gpu
def test_temporaries_of_a_captured_function_are_idle_until_it_is_released() -> None:
    captured, device = Captured(lambda x: (x.repeat(64) + 1).sum(), Recorder()), torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()  # of pools that earlier tests have left
    x, before = torch.ones(2**20, device=device), idle_pool_bytes(device)
    captured(x)
    assert 2 * 64 * 2**22 <= idle_pool_bytes(device) - before < 2 * 64 * 2**22 + 2**26
    captured.release()
    torch.cuda.empty_cache()
    assert idle_pool_bytes(device) == before


@pytest.mark.gpu
def test_captured_graph_replays_forward_and_backward_bit_for_bit() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 64, device=DEVICE, requires_grad=True)

    def loss_and_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = (x @ weight).relu().square().mean()
        return loss.detach(), torch.autograd.grad(loss, weight)[0]

    recorder = Recorder()
    captured = Captured(loss_and_gradient, recorder)
    for _ in range(3):
        recorder.run(lambda: loss_and_gradient(torch.randn(32, 64, device=DEVICE)))
    for _ in range(3):
        x = torch.randn(32, 64, device=DEVICE)
        for got, expected in zip(captured(x), loss_and_gradient(x), strict=True):
            assert torch.equal(got, expected)
    captured.release()
    assert torch.equal(captured(x)[0], loss_and_gradient(x)[0])


@pytest.mark.gpu
def test_captured_host_read_is_refused() -> None:
    captured = Captured(lambda x: x * x.sum().item(), Recorder())
    x = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="compile.cudagraph"):
        captured(x)
    assert torch.rand(3, device=DEVICE).isfinite().all()  # the generator has left its capture mode
