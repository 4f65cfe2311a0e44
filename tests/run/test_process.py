"""The process group restores the state of the process, and stop signals end all ranks at the same step."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_moe.config import RecipeError
from titan_moe.config.train import RunConfig
from titan_moe.run.determinism import determinism
from titan_moe.run.process import StopSignal, process_group


def test_process_group_without_torchrun_has_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with process_group(RunConfig(device="cpu")) as device:
        assert device == torch.device("cpu") and dist.get_world_size() == 1
    assert not dist.is_initialized()


def test_process_group_sets_determinism_before_the_first_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "of an earlier run")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "of an earlier run")
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    with process_group(RunConfig(device="cpu", is_deterministic=True)):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and os.environ["NCCL_NVLS_ENABLE"] == "0"
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_process_group_refuses_variables_that_are_not_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    with (
        pytest.raises(RecipeError) as refusal,
        process_group(RunConfig(device="cpu", is_deterministic=True)),
    ):
        raise AssertionError("nothing runs")
    text = str(refusal.value)
    assert "needs CUBLAS_WORKSPACE_CONFIG = :4096:8 or :16:8, and the environment has :0:0; unset it" in text
    assert "needs NCCL_NVLS_ENABLE = 0, and the environment has 2" in text and not dist.is_initialized()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    with determinism(True):
        assert torch._inductor.config.deterministic and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    with determinism(False):
        assert not torch._inductor.config.deterministic and not torch.are_deterministic_algorithms_enabled()


def test_process_group_clears_cached_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for _ in range(2):
        with process_group(RunConfig(device="cpu")):
            mesh = init_device_mesh("cpu", (1,))
            x = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
            assert (x * 2).device_mesh is mesh


def test_process_group_sets_the_timeouts_of_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the limits of the watchdog, which names the late rank."""
    monkeypatch.delenv("RANK", raising=False)
    for minutes, hours in ((10.0, 70 / 60), (60.0, 7.0), (0.0, 0.5)):
        with process_group(RunConfig(device="cpu", step_timeout_minutes=minutes)):
            group = dist.new_group(backend="gloo")
            timeout = group._get_backend(torch.device("cpu")).options._timeout
            assert abs(timeout - timedelta(hours=hours)) < timedelta(seconds=1)  # gloo of torch 2.15 rounds up
    assert dist.distributed_c10d.default_pg_timeout == timedelta(minutes=30)


def stop_step(number: int) -> int:
    """Poll in every step. Only rank 1 receives the signal, in its third step."""
    before = signal.getsignal(number)
    with StopSignal() as stop:
        step = 0
        while not stop.poll() and step < 50:
            step += 1
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), number)
            time.sleep(0.01 * dist.get_rank())
    assert signal.getsignal(number) == before and stop.number == number
    return step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stop_signal_stops_ranks_after_the_same_step(ranks, number: int) -> None:
    assert ranks(2, stop_step, number) == [4, 4]


def test_stop_signal_second_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with process_group(RunConfig(device="cpu")), StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert [stop.poll(), stop.poll()] == [False, True] and stop.number == signal.SIGINT
