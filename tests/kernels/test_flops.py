"""FlopCounterMode counts the GEMMs inside our operations: once in forward, twice in backward."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from titan_moe.kernels.registry import Sample, load_all

GEMMS = ("grouped_mm", "fused_expert_mlp", "router_logits", "linear_cross_entropy", "fused_cross_entropy")


@pytest.mark.parametrize("name", GEMMS)
def test_counted_flops_equal_benchmark_flops(name: str) -> None:
    kernel = load_all()[name]
    with FakeTensorMode():
        if kernel.benchmarks:
            sample = kernel.benchmarks[0].draw(torch.device("cpu"))
            forward, total = kernel.benchmarks[0].forward_flops, kernel.benchmarks[0].total_flops
        else:
            x, weight, offsets = torch.randn(64, 32), torch.randn(4, 48, 32), torch.empty(4, dtype=torch.int32)
            sample, forward, total = Sample("", (x, weight, offsets), 2), 2 * 64 * 32 * 48, 6 * 64 * 32 * 48
        inputs = [x.requires_grad_() for x in sample.args[: sample.num_differentiable]]
        with FlopCounterMode(display=False) as counter:
            out = kernel.op(*sample.args)
            assert counter.get_total_flops() == forward
            torch.autograd.grad(out, inputs, torch.empty_like(out))
        assert counter.get_total_flops() == total
