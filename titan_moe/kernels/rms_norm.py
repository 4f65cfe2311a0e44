"""RMSNorm (arXiv:1910.07467), alone or together with the residual addition before it.

T tokens · D width · P programs of the backward pass

Physics: memory-bound. With the addition, forward reads x and the residual and writes their sum and its norm, 4·T·D
elements; backward reads the two gradients that arrive and the sum, and writes one gradient for both addends, 4·T·D
again. Apart they would move 3·T·D more. Kept for backward is the sum, which the residual stream keeps anyway, and one
fp32 number a token. The weight's gradient needs every token: each of P programs adds up its own tokens in registers,
and one sum over [P, D] follows, 2 % of the pass at 16,384 tokens; no atomics, so two runs agree bit for bit. The
addition is rounded to the input's dtype before it is normed, as if it went through memory; everything after is fp32 and
rounded once.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.registry import Benchmark, Kernel, Sample, Tunable, register

MAX_WIDTH = 16_384
NUM_PROGRAMS = 264
"""At most so many programs share the backward pass: two for each multiprocessor of an H200."""
TILES_A_PROGRAM = 4
"""At least so many tiles has each, or the partial sums would weigh as much as the pass."""


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x over the root of its mean square, times the weight; in at least fp32 inside, in x's dtype."""
    wide_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    rstd_T1 = torch.rsqrt(wide_TD.square().mean(-1, keepdim=True) + eps)
    return (wide_TD * rstd_T1 * weight_D).to(x_TD.dtype)


def add_rms_norm_reference(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, and its norm."""
    h_TD = x_TD + residual_TD
    return h_TD, rms_norm_reference(h_TD, weight_D, eps)


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, h_ptr, normed_ptr, rstd_ptr, T, x_stride, residual_stride, eps,
    D: tl.constexpr, ADDS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)[None, :]
    keep = (row < T)[:, None] & (column < D)
    x = tl.load(x_ptr + row[:, None] * x_stride + column, mask=keep, other=0.0)
    if ADDS:
        residual = tl.load(residual_ptr + row[:, None] * residual_stride + column, mask=keep, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row[:, None] * D + column, x, mask=keep)
    wide = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    normed = (wide * rstd[:, None] * weight).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + row[:, None] * D + column, normed, mask=keep)
    tl.store(rstd_ptr + row, rstd, mask=row < T)


@triton.jit
def _norm_backward_kernel(
    dnormed_ptr, dh_ptr, h_ptr, weight_ptr, rstd_ptr, dx_ptr, dweight_ptr, T, dnormed_stride, dh_stride, h_stride,
    D: tl.constexpr, ADDS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK_D)[None, :]
    dweight = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        keep = (row < T)[:, None] & (column < D)
        dnormed = tl.load(dnormed_ptr + row[:, None] * dnormed_stride + column, mask=keep, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + row[:, None] * h_stride + column, mask=keep, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < T, other=0.0)[:, None]
        direction = h * rstd
        dweight += dnormed * direction
        # read for every tile: held in registers, it would push others out at full width
        dnormed *= tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
        along = tl.sum(dnormed * direction, axis=1)[:, None] / D
        dx = (dnormed - direction * along) * rstd
        if ADDS:
            dx += tl.load(dh_ptr + row[:, None] * dh_stride + column, mask=keep, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row[:, None] * D + column, dx.to(dx_ptr.dtype.element_ty), mask=keep)
    dweight = tl.sum(dweight, axis=0)[None, :]
    tl.store(dweight_ptr + tl.program_id(0) * D + column, dweight, mask=column < D)


def _tiles(num_columns: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and its warps: 16 elements a thread."""
    block_d = triton.next_power_of_2(num_columns)
    num_rows = min(max(4096 // block_d, 1), 32)
    return num_rows, block_d, min(max(num_rows * block_d // 512, 1), 32)


def norm_forward(x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, ...]:
    """The norm and the fp32 factor 1/rms of each token; with a residual the sum too, in front of them."""
    num_tokens, width = x_TD.shape
    num_rows, block_d, num_warps = _tiles(width)
    normed_TD, rstd_T = x_TD.new_empty(x_TD.shape), x_TD.new_empty(num_tokens, dtype=torch.float32)
    h_TD = normed_TD if residual_TD is None else torch.empty_like(normed_TD)
    other_TD = x_TD if residual_TD is None else residual_TD
    if num_tokens:
        _norm_kernel[(triton.cdiv(num_tokens, num_rows),)](
            x_TD, other_TD, weight_D, h_TD, normed_TD, rstd_T, num_tokens, x_TD.stride(0), other_TD.stride(0), eps,
            D=width, ADDS=residual_TD is not None, ROWS=num_rows, BLOCK_D=block_d, num_warps=num_warps,
        )  # fmt: skip
    return (normed_TD, rstd_T) if residual_TD is None else (h_TD, normed_TD, rstd_T)


def norm_backward(
    dnormed_TD: Tensor, dh_TD: Tensor | None, h_TD: Tensor, weight_D: Tensor, rstd_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of what was normed (or of each of its addends) and of the weight."""
    num_tokens, width = h_TD.shape
    num_rows, block_d, num_warps = _tiles(width)
    dx_TD = h_TD.new_empty(h_TD.shape)
    dnormed_TD, h_TD = _with_whole_rows(dnormed_TD), _with_whole_rows(h_TD)
    other_TD = dnormed_TD if dh_TD is None else _with_whole_rows(dh_TD)
    num_programs = min(triton.cdiv(num_tokens, num_rows * TILES_A_PROGRAM), NUM_PROGRAMS)
    dweight_PD = rstd_T.new_empty(num_programs, width)
    if num_tokens:
        _norm_backward_kernel[(num_programs,)](
            dnormed_TD, other_TD, h_TD, weight_D, rstd_T, dx_TD, dweight_PD, num_tokens,
            dnormed_TD.stride(0), other_TD.stride(0), h_TD.stride(0),
            D=width, ADDS=dh_TD is not None, ROWS=num_rows, BLOCK_D=block_d, num_warps=num_warps,
        )  # fmt: skip
    return dx_TD, dweight_PD.sum(0).to(weight_D.dtype)


def _with_whole_rows(x_TD: Tensor) -> Tensor:
    """Rows may lie anywhere, but a row's elements must be neighbours."""
    return x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()


@torch.library.custom_op("titan_moe::rms_norm", mutates_args=())
def _rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed_TD, rstd_T = norm_forward(_with_whole_rows(x_TD), None, weight_D.contiguous(), eps)
    return normed_TD, rstd_T


@_rms_norm.register_fake
def _(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape[0], dtype=torch.float32)


@torch.library.custom_op("titan_moe::add_rms_norm", mutates_args=())
def _add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    rows_TD, other_TD = _with_whole_rows(x_TD), _with_whole_rows(residual_TD)
    h_TD, normed_TD, rstd_T = norm_forward(rows_TD, other_TD, weight_D.contiguous(), eps)
    return h_TD, normed_TD, rstd_T


@_add_rms_norm.register_fake
def _(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    rstd_T = x_TD.new_empty(x_TD.shape[0], dtype=torch.float32)
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape), rstd_T


@torch.library.custom_op("titan_moe::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dnormed_TD: Tensor, dh_TD: Tensor | None, h_TD: Tensor, weight_D: Tensor, rstd_T: Tensor
) -> tuple[Tensor, Tensor]:
    return norm_backward(dnormed_TD, dh_TD, h_TD, weight_D.contiguous(), rstd_T)


@_rms_norm_backward.register_fake
def _(
    dnormed_TD: Tensor, dh_TD: Tensor | None, h_TD: Tensor, weight_D: Tensor, rstd_T: Tensor
) -> tuple[Tensor, Tensor]:
    return h_TD.new_empty(h_TD.shape), weight_D.new_empty(weight_D.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # or zeros are written for the factors 1/rms, which have no gradient
    *_, weight_D, _ = inputs
    h_TD = inputs[0] if len(output) == 2 else output[0]
    ctx.save_for_backward(h_TD, weight_D, output[-1])
    ctx.mark_non_differentiable(output[-1])


def _backward(ctx: Any, dnormed_TD: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dnormed_TD is None:
        return None, None, None
    return (*_rms_norm_backward(dnormed_TD, None, *ctx.saved_tensors), None)


def _add_backward(ctx: Any, dh_TD: Tensor | None, dnormed_TD: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dnormed_TD is None:
        return dh_TD, dh_TD, None, None
    dx_TD, dweight_D = _rms_norm_backward(dnormed_TD, dh_TD, *ctx.saved_tensors)
    return dx_TD, dx_TD, dweight_D, None


_rms_norm.register_autograd(_backward, setup_context=_save)
_add_rms_norm.register_autograd(_add_backward, setup_context=_save)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Norm over the last dimension in Triton: [..., D] -> [..., D], bf16 or fp32."""
    _check(x)
    return _rms_norm(x.flatten(0, -2), weight_D, eps)[0].view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual, and its norm over the last dimension, in Triton: [..., D] twice -> [..., D] twice, bf16 or fp32."""
    _check(x)
    if x.dtype != residual.dtype:
        # the sum is stored in x's dtype, which could be the narrower one
        raise ValueError(
            f"RMSNorm in Triton adds tensors of one dtype, not {x.dtype} and {residual.dtype}; "
            'take perf.override.norm = "torch"'
        )
    h_TD, normed_TD, _ = _add_rms_norm(x.flatten(0, -2), residual.flatten(0, -2), weight_D, eps)
    return h_TD.view(x.shape), normed_TD.view(x.shape)


def _check(x: Tensor) -> None:
    if x.shape[-1] > MAX_WIDTH or x.dtype == torch.float64:
        raise ValueError(
            f"RMSNorm in Triton is for fp32 or less and at most {MAX_WIDTH} wide, not {x.dtype} and {x.shape[-1]}; "
            'take perf.override.norm = "torch"'
        )


def _add_samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    samples = []
    for name, num_tokens, width in (
        ("no_token", 0, 64),
        ("one_token", 1, 2048),
        ("part_of_a_tile", 37, 64),
        ("many_tiles", 700, 64),
        ("wide", 5, 7168),
        ("odd_width", 5, 93),
    ):
        x_TD, residual_TD = torch.randn(2, num_tokens, width, device=device, dtype=dtype).unbind()
        weight_D = 1 + torch.randn(width, device=device, dtype=dtype) / 8
        samples.append(Sample(name, (x_TD, residual_TD, weight_D, 1e-6), 3))
    small_TD = 1e-3 * torch.randn(9, 96, device=device, dtype=dtype)  # epsilon is as large as the mean square
    samples.append(Sample("small", (small_TD, torch.zeros_like(small_TD), torch.ones_like(small_TD[0]), 1e-6), 3))
    rows_T2D, columns_DT = (
        torch.randn(9, 2, 96, device=device, dtype=dtype),
        torch.randn(96, 9, device=device, dtype=dtype),
    )
    samples.append(Sample("strided", (rows_T2D[:, 0], columns_DT.T, rows_T2D[0].T.flatten()[::2], 1e-6), 3))
    return samples


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    def without_residual(sample: Sample) -> Sample:
        x_TD, _, weight_D, eps = sample.args
        return Sample(sample.name, (x_TD, weight_D, eps), 2)

    return [without_residual(sample) for sample in _add_samples(device, dtype)]


SHAPES = {"qwen3": (16_384, 2048), "mixtral": (16_384, 4096), "deepseek_v3": (8192, 7168)}
"""Residual streams worth timing: tokens, width."""


def _benchmarks(num_inputs: int, forward_passes: int, backward_passes: int) -> tuple[Benchmark, ...]:
    """One call a shape; a pass moves T·D bf16 elements."""

    def benchmark(name: str, num_tokens: int, width: int) -> Benchmark:
        def draw(device: torch.device) -> Sample:
            inputs = torch.randn(num_inputs, num_tokens, width, device=device, dtype=torch.bfloat16).unbind()
            weight_D = torch.ones(width, device=device, dtype=torch.bfloat16)
            return Sample(name, (*inputs, weight_D, 1e-6), num_inputs + 1)

        moved = 2.0 * num_tokens * width
        return Benchmark(name, draw, 0, 0, forward_passes * moved, (forward_passes + backward_passes) * moved)

    return tuple(benchmark(name, *shape) for name, shape in SHAPES.items())


def _torch_rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def _torch_add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h_TD = x_TD + residual_TD
    return h_TD, _torch_rms_norm(h_TD, weight_D, eps)


def _norms_of_a_block(
    norm: Callable[..., Tensor], add_and_norm: Callable[..., tuple[Tensor, Tensor]]
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """What `Kernels.norm` chooses: the norm before attention, and the addition and the norm after it."""

    def op(
        x_TD: Tensor, attended_TD: Tensor, attention_weight_D: Tensor, ffn_weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return norm(x_TD, attention_weight_D, eps), *add_and_norm(x_TD, attended_TD, ffn_weight_D, eps)

    return op


def _draw(shape: Mapping[str, Any], device: torch.device) -> Sample:
    rows = [torch.randn(shape["tokens"], shape["width"], device=device, dtype=torch.bfloat16) for _ in range(2)]
    weights = [torch.ones(shape["width"], device=device, dtype=torch.bfloat16) for _ in range(2)]
    return Sample("", (*rows, *weights, 1e-6), 4)


register(
    Kernel(
        "rms_norm",
        rms_norm,
        rms_norm_reference,
        _samples,
        needs_triton=True,
        benchmarks=_benchmarks(1, 2, 3),
        rivals={"torch": _torch_rms_norm, "torch, compiled": torch.compile(_torch_rms_norm, fullgraph=True)},
    )
)
register(
    Kernel(
        "add_rms_norm",
        add_rms_norm,
        add_rms_norm_reference,
        _add_samples,
        needs_triton=True,
        benchmarks=_benchmarks(2, 4, 4),
        rivals={"torch": _torch_add_rms_norm, "torch, compiled": torch.compile(_torch_add_rms_norm, fullgraph=True)},
        tunable=Tunable(
            "norm",
            {
                "torch": _norms_of_a_block(_torch_rms_norm, _torch_add_rms_norm),
                "triton": _norms_of_a_block(rms_norm, add_rms_norm),
            },
            _draw,
        ),
    )
)
