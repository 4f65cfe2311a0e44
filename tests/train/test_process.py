"""What a run changes in its process, it changes back; ranks stop together."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_moe.config.train import RunConfig
from titan_moe.train.process import StopSignal, process_group


def test_process_group_of_a_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with process_group(RunConfig(device="cpu")) as device:
        assert device == torch.device("cpu") and dist.get_world_size() == 1
    assert not dist.is_initialized()


def test_process_determinism_is_set_before_the_first_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "of an earlier run")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with process_group(RunConfig(device="cpu", is_deterministic=True)):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_process_group_frees_the_meshes_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for _ in range(2):
        with process_group(RunConfig(device="cpu")):
            mesh = init_device_mesh("cpu", (1,))
            spread = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
            assert (spread * 2).device_mesh is mesh


def stop_step() -> int:
    """Poll every step; the second rank alone has the signal, before its third one."""
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        step = 0
        while not stop.poll() and step < 50:
            step += 1
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01 * dist.get_rank())
    assert signal.getsignal(signal.SIGTERM) == before
    return step


def test_stop_signal_stops_ranks_after_the_same_step(ranks) -> None:
    assert ranks(2, stop_step) == [4, 4]


def test_stop_signal_ends_at_once_at_a_second_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with process_group(RunConfig(device="cpu")), StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert [stop.poll(), stop.poll()] == [False, True] and stop.number == signal.SIGINT
