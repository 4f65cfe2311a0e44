"""Formats on a GPU: the bits of the CPU, no host reads, replays of a captured step."""

import pytest
import torch
from torch import Tensor

from titan_moe.config.formats import Format, GemmFormats
from titan_moe.kernels.formats.casts import Role, quantize
from titan_moe.kernels.formats.grouped import emulated_grouped_mm

pytestmark = pytest.mark.gpu
SCALED: tuple[Format, ...] = ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4")
ROLES: tuple[Role, ...] = ("activation", "weight", "gradient")


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("format", SCALED)
def test_casts_have_the_bits_of_a_cpu(format: Format, role: Role, dim: int) -> None:
    torch.manual_seed(0)
    x_MN = torch.randn(300, 500) * torch.exp2(torch.randint(-10, 10, (300, 500)))
    for on_cpu, on_gpu in zip(quantize(x_MN, format, role, dim), quantize(x_MN.cuda(), format, role, dim), strict=True):
        if on_cpu is not None and on_gpu is not None:
            assert torch.equal(on_cpu.float(), on_gpu.cpu().float())


def step(
    format: Format, x_RI: Tensor, weight_eOI: Tensor, offsets_e: Tensor, grad_RO: Tensor, in_triton: bool = False
) -> list[Tensor]:
    gemm = emulated_grouped_mm(GemmFormats(format, format, format), in_triton=in_triton)
    y_RO = gemm(x_RI, weight_eOI, None, offsets_e)
    return [y_RO, *torch.autograd.grad(y_RO, [x_RI, weight_eOI], grad_RO)]


@pytest.mark.parametrize("in_triton", [False, True])
@pytest.mark.parametrize("format", SCALED)
def test_a_captured_step_reads_new_borders(format: Format, in_triton: bool) -> None:
    torch.manual_seed(0)
    x_RI, grad_RO, weight_eOI = torch.randn(1000, 192), torch.randn(1000, 256), torch.randn(4, 256, 192)
    borders = [torch.tensor(ends, dtype=torch.int32) for ends in ((3, 400, 400, 990), (0, 17, 800, 801))]
    on_cpu = [x_RI, weight_eOI, borders[0], grad_RO]
    args = [arg.cuda() for arg in on_cpu]
    for args_of in (on_cpu, args):
        args_of[0].requires_grad_()
        args_of[1].requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(format, *args, in_triton)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step(format, *args, in_triton)
    for offsets_e in borders:
        args[2].copy_(offsets_e)
        graph.replay()
        expected = step(format, x_RI, weight_eOI, offsets_e, grad_RO)
        for on_gpu, wanted in zip(captured, expected, strict=True):
            error = (on_gpu.cpu() - wanted).norm() / wanted.norm()
            assert error < 1e-5
