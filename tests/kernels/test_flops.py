"""FlopCounterMode counts the GEMMs inside our operations: once in forward, twice in backward.

tests/tools/test_bench_kernels.py counts those of the operations that have benchmarks.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from titan_moe.config.formats import GemmFormats
from titan_moe.kernels.experts.grouped_mm import grouped_mm
from titan_moe.kernels.formats.grouped import emulated_grouped_mm
from titan_moe.kernels.formats.linear import emulated_linear


def test_flops_of_grouped_mm_are_counted() -> None:
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        x_RI, weight_eOI = (torch.randn(shape, requires_grad=True) for shape in ((64, 32), (4, 48, 32)))
        out_RO = grouped_mm(x_RI, weight_eOI, None, torch.empty(4, dtype=torch.int32))
        assert counter.get_total_flops() == 2 * 64 * 32 * 48
        torch.autograd.grad(out_RO, [x_RI, weight_eOI], torch.empty_like(out_RO))
    assert counter.get_total_flops() == 6 * 64 * 32 * 48


def test_flops_of_emulated_gemms_are_counted() -> None:
    formats = GemmFormats("mxfp8", "mxfp8", "mxfp8")
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        x_RI, weight_eOI = (torch.randn(shape, requires_grad=True) for shape in ((64, 32), (4, 48, 32)))
        grouped_RO = emulated_grouped_mm(formats)(x_RI, weight_eOI, None, torch.empty(4, dtype=torch.int32))
        for y_RO in (grouped_RO, emulated_linear(x_RI, weight_eOI[0], formats)):
            torch.autograd.grad(y_RO, [x_RI, weight_eOI], torch.empty_like(y_RO))
    assert counter.get_total_flops() == 2 * 6 * 64 * 32 * 48
