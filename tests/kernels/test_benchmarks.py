"""Benchmark inputs of the registry fit their operations and baselines, on fake tensors (sizes without memory)."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_moe.kernels.registry import Benchmark, Kernel, as_tuple, load_all

CASES = [
    pytest.param(kernel, benchmark, id=f"{kernel.name}-{benchmark.name}")
    for kernel in load_all().values()
    for benchmark in kernel.benchmarks
]


@pytest.mark.parametrize(("kernel", "benchmark"), CASES)
def test_benchmark_inputs_fit_operation_and_baselines(kernel: Kernel, benchmark: Benchmark) -> None:
    assert benchmark.total_bytes >= benchmark.forward_bytes > 0
    assert benchmark.total_flops >= benchmark.forward_flops >= 0
    with FakeTensorMode():
        sample = benchmark.draw(torch.device("cpu"))
        for x in sample.args[: sample.num_differentiable]:
            x.requires_grad_()
        expected = as_tuple(kernel.op(*sample.args))
        for name, baseline in kernel.baselines.items():
            if "compiled" not in name:
                assert [out.shape for out in as_tuple(baseline(*sample.args))] == [out.shape for out in expected]
        inputs = sample.args[: sample.num_differentiable]
        if not inputs:
            return
        grads = torch.autograd.grad(expected, inputs, [torch.empty_like(out) for out in expected])
        assert [grad.shape for grad in grads] == [x.shape for x in inputs]


def test_benchmark_flops_of_expert_mlp() -> None:
    """Six FLOPs a slot and weight pair: 131,072 slots of 2048 x 768 are 1.24 TFLOP forward."""
    fused = load_all()["fused_expert_mlp"]
    (benchmark,) = (benchmark for benchmark in fused.benchmarks if benchmark.name == "qwen3_ep8")
    assert benchmark.forward_flops == 6 * 131_072 * 2048 * 768
    assert benchmark.total_flops == 3 * benchmark.forward_flops
