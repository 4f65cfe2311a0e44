"""Inputs and work of the kernel benchmarks fit their operations, on fake tensors (sizes without memory)."""

import importlib
from pathlib import Path

import pytest
import torch
from support.kernel_samples import as_tuple
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.slow

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2] / "tools")
    BENCHMARKS = importlib.import_module("kernel_benchmarks").BENCHMARKS
CASES = [(kernel, case) for kernel, benchmark in BENCHMARKS.items() for case in benchmark.cases]


@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_benchmark_inputs_and_flops_fit_all_implementations(kernel: str, case: str) -> None:
    draw, forward_flops, total_flops, forward_bytes, total_bytes = BENCHMARKS[kernel].cases[case]
    assert total_bytes >= forward_bytes > 0
    ours, *others = (op for name, op in BENCHMARKS[kernel].ops.items() if "compiled" not in name)
    with FakeTensorMode():
        sample = draw(torch.device("cpu"))
        inputs = [x.requires_grad_() for x in sample.args[: sample.num_differentiable]]
        with FlopCounterMode(display=False) as counter:
            outs = as_tuple(ours(*sample.args))
            assert counter.get_total_flops() == forward_flops
            if inputs:
                differentiable = [out for out in outs if out.requires_grad]
                torch.autograd.grad(differentiable, inputs, [torch.empty_like(out) for out in differentiable])
            assert counter.get_total_flops() == total_flops
        for other in others:
            assert [out.shape for out in as_tuple(other(*sample.args))] == [out.shape for out in outs]


def test_benchmark_flops_of_expert_mlp() -> None:
    """Six FLOPs a slot and weight pair: 131,072 slots of 2048 x 768 are 1.24 TFLOP forward."""
    case = BENCHMARKS["fused_expert_mlp"].cases["qwen3_ep8"]
    assert case.forward_flops == 6 * 131_072 * 2048 * 768 and case.total_flops == 3 * case.forward_flops
