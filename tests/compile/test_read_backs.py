"""Kernels that Inductor generates for GPUs wait for all threads before they read back what they have stored."""

import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.graph import GraphLowering
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from titan_moe.compile.read_backs import TAG, add_barriers
from titan_moe.versions import READS_BACK_WITHOUT_BARRIER

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton's compiler")


class Generated(Exception):
    """Ends a compilation with the code."""


def gather_sum_and_project(y_RD: Tensor, slots_SK: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    """The backward of a dispatch and of a norm: a row is summed up, stored, and read once more."""
    total_SD = y_RD.new_zeros(slots_SK.shape[0], y_RD.shape[1], dtype=torch.float32)
    for slots_S in slots_SK.unbind(1):
        total_SD = total_SD + torch.where((slots_S >= 0)[:, None], y_RD[slots_S.clamp(min=0)], 0)
    return total_SD, total_SD - weight_D * (total_SD * weight_D).sum(1, keepdim=True)


@pytest.fixture
def read_backs(monkeypatch: pytest.MonkeyPatch):
    """Of each read-back in the code that Inductor generates, as for a GPU: whether a barrier is before it."""
    fake_driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(driver, "_active", fake_driver)
    monkeypatch.setattr(TritonKernel, "load", TritonKernel.load)  # undone after the test
    device_of = GraphLowering.get_current_device_or_throw

    def device_for_loads(graph: GraphLowering) -> torch.device:
        """Of a GPU where a load asks: PyTorch's own barriers are not for CPUs."""
        is_of_load = sys._getframe(1).f_code is load.__code__
        return torch.device("cuda") if is_of_load else device_of(graph)

    load = TritonKernel.load
    monkeypatch.setattr(GraphLowering, "get_current_device_or_throw", device_for_loads)
    code: list[str] = []

    def stop(graph: GraphLowering) -> None:
        code.append(graph.codegen()[0].value)
        raise Generated

    monkeypatch.setattr(GraphLowering, "compile_to_module", stop)

    def find() -> list[bool]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        args = torch.randn(1024, 256).bfloat16(), torch.randint(-1, 1024, (512, 2)).int(), torch.randn(256)
        loops = {"triton.persistent_reductions": False}  # as over wider rows
        settings = loops | {"cpu_backend": "triton", "fx_graph_cache": False, "compile_threads": 1}
        with config.patch(settings), torch.no_grad():
            with pytest.raises(Exception, match="Generated"):
                torch.compile(gather_sum_and_project, fullgraph=True)(*args)
        found = []
        for kernel in re.findall(r"^def triton_.*?^'''", code.pop(), re.S | re.M):
            for name in set(re.findall(r"tl\.store\((\w+)", kernel)) & set(re.findall(r"tl\.load\((\w+)", kernel)):
                stored = kernel.index(f"tl.store({name}")
                between = kernel[stored : kernel.index(f"tl.load({name}", stored)]
                found.append("tl.debug_barrier()" in between)
        return found

    with torch.compiler.config.patch(cache_key_tag="mine"):
        yield find


@pytest.mark.slow
def test_read_backs_are_behind_barriers(read_backs) -> None:
    before = read_backs()
    assert before and all(before) != READS_BACK_WITHOUT_BARRIER.is_here
    for _ in range(2):
        add_barriers()
    found = read_backs()
    assert found and all(found)
    tags = ["mine"] + [TAG] * READS_BACK_WITHOUT_BARRIER.is_here
    assert torch.compiler.config.cache_key_tag == " ".join(tags)
