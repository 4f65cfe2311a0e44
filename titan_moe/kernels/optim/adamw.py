"""AdamW (arXiv:1711.05101) on the shards of many parameters, each in one pass over memory.

Physics: memory-bound. An element moves the parameter in and out, the gradient in, two moments in and out: 7·4 = 28
bytes in fp32, 4 + 4 + 4 + 4·2 = 20 with bf16 moments, 7·2 = 14 all in bf16. Clipping costs no pass of its own: its
coefficient is applied to the gradient as it is read, which saves 8 bytes an element. A rank that holds an eighth of
Qwen3-30B streams 76 GB (bf16 moments), 16 ms of an H200. An element takes 35 instructions in fp32, 60 with bf16
moments, 75 all in bf16 (counted in the code for sm_90); an H200 issues 170, 120 and 85 while it moves the bytes. A
launch a tensor is enough: 48 layers have some 500 shards, an average one keeps the GPU busy for 30 us, longer than it
takes to launch the next, and a captured step launches them for nothing. But an operation a tensor would not be: its way
through PyTorch costs the host more than that, so one operation takes them all. Measured on an H200: 4.1 TB/s in fp32
(PyTorch's fused one 3.5) and with bf16 moments, 3.5 all in bf16 (2.7).

Math is fp32, the bias corrections fp64. What is stored in bf16 is rounded at random (stochastic_rounding.py). It must
be: at beta2 = 0.999 a second moment that nothing feeds falls by a thousandth a step; rounding to nearest, which forgets
less than 2 to 4 thousandths, would hold it up forever and keep the steps of its parameter too small. A bf16 parameter
loses its updates in the same way when the learning rate is low. The update itself uses the moments before they are
rounded.

All that changes from step to step is on the device: a captured step reads the learning rate, the step, the clipping
coefficient and the guard anew. Where the guard `found_inf` is not 0 nothing is read or written, whatever the gradient.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.optim.stochastic_rounding import (
    NUM_ROUNDS,
    QUARTER,
    draw_words,
    draw_words_reference,
    round_to_bf16,
    round_to_bf16_reference,
)
from titan_moe.kernels.registry import Benchmark, Kernel, Sample, register

MOMENTS_STREAM, PARAM_STREAM = 0, 1


def adamw_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    step: Tensor,
    found_inf: Tensor,
    grad_factor: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    seed: int,
    is_stochastic: bool = True,
) -> None:
    """The definition on one shard, in at least fp32, with the kernel's random bits; arguments as of `adamw`."""
    wide = torch.promote_types(param.dtype, torch.float32)
    count, rate = step.double(), lr.to(wide)
    corrections = [1 - torch.pow(beta, count) for beta in (beta1, beta2)]
    gradient = grad.to(wide) * grad_factor.to(wide)
    first = torch.lerp(exp_avg.to(wide), gradient, 1 - beta1)
    second = torch.lerp(exp_avg_sq.to(wide), gradient.square(), 1 - beta2)
    denominator = (second / corrections[1].to(wide)).sqrt() + eps
    update = first / corrections[0].to(wide) / denominator + weight_decay * param.to(wide)
    values = (param.to(wide) - rate * update, first, second)
    stored = (param, exp_avg, exp_avg_sq)
    bits: list[Tensor | None] = [None, None, None]
    if is_stochastic and torch.bfloat16 in (tensor.dtype for tensor in stored):
        moments = draw_words_reference(param.numel(), seed, step, MOMENTS_STREAM).view(param.shape)
        bits = [
            draw_words_reference(param.numel(), seed, step, PARAM_STREAM).view(param.shape) & 0xFFFF,
            moments & 0xFFFF,
            moments >> 16,
        ]
    for tensor, value, own in zip(stored, values, bits, strict=True):
        is_rounded = own is not None and tensor.dtype == torch.bfloat16
        new = round_to_bf16_reference(value, own) if is_rounded else value.to(tensor.dtype)
        tensor.copy_(torch.where(found_inf != 0, tensor, new))


@triton.jit
def _store(ptr, value, bits, keep, IS_ROUNDED: tl.constexpr):
    if IS_ROUNDED:
        tl.store(ptr, round_to_bf16(value, bits), mask=keep)
    else:
        tl.store(ptr, value.to(ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["seed"])
def _adamw_kernel(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, lr_ptr, step_ptr, found_inf_ptr, grad_factor_ptr, numel,
    rest1, rest2, log_beta1, log_beta2, eps, weight_decay, seed,
    ROUND_PARAM: tl.constexpr, ROUND_FIRST: tl.constexpr, ROUND_SECOND: tl.constexpr, QUARTER: tl.constexpr,
    NUM_ROUNDS: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf_ptr) != 0:
        return
    step = tl.load(step_ptr)
    grad_factor = tl.load(grad_factor_ptr).to(tl.float32)
    lr = tl.load(lr_ptr).to(tl.float32)
    # a beta close to 1 leaves few digits of the corrections in fp32; a few scalars a program cost nothing
    count = step.to(tl.float64)
    step_size = lr / (1 - tl.exp(count * log_beta1)).to(tl.float32)
    spread = 1 / tl.sqrt((1 - tl.exp(count * log_beta2)).to(tl.float32))
    block = tl.program_id(0).to(tl.int64)
    moment_words = draw_words(seed, block, step, 0, QUARTER, NUM_ROUNDS, ROUND_FIRST or ROUND_SECOND)
    param_words = draw_words(seed, block, step, 1, QUARTER, NUM_ROUNDS, ROUND_PARAM)
    for quarter in tl.static_range(4):
        index = (block * 4 + quarter) * QUARTER + tl.arange(0, QUARTER)
        keep = index < numel
        param = tl.load(param_ptr + index, mask=keep, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + index, mask=keep, other=0.0).to(tl.float32) * grad_factor
        first = tl.load(exp_avg_ptr + index, mask=keep, other=0.0).to(tl.float32)
        second = tl.load(exp_avg_sq_ptr + index, mask=keep, other=0.0).to(tl.float32)
        first += rest1 * (grad - first)
        second += rest2 * (grad * grad - second)
        # approximate root and quotient: two units in the last place of an update are far below those of the parameter
        param -= step_size * first / (tl.sqrt(second) * spread + eps) + lr * weight_decay * param
        _store(param_ptr + index, param, param_words[quarter] & 0xFFFF, keep, ROUND_PARAM)
        _store(exp_avg_ptr + index, first, moment_words[quarter] & 0xFFFF, keep, ROUND_FIRST)
        _store(exp_avg_sq_ptr + index, second, moment_words[quarter] >> 16, keep, ROUND_SECOND)


def launch_adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    step: Tensor,
    found_inf: Tensor,
    grad_factor: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    seed: int,
    is_stochastic: bool = True,
) -> None:
    """The reference in Triton: fp32 and bf16 in, fp32 inside."""
    stored = (param, exp_avg, exp_avg_sq)
    if torch.float64 in (tensor.dtype for tensor in (grad, *stored)):
        raise ValueError("AdamW in Triton computes in fp32 and was given fp64; take torch's, or the reference")
    if not all(tensor.is_contiguous() for tensor in stored):
        # no parameter of ours lies so; a detour over memory of its own keeps the kernel flat
        dense = [tensor.contiguous() for tensor in stored]
        scalars = (lr, step, found_inf, grad_factor, beta1, beta2, eps, weight_decay, seed, is_stochastic)
        launch_adamw(dense[0], grad, dense[1], dense[2], *scalars)
        for tensor, copy in zip(stored, dense, strict=True):
            tensor.copy_(copy)
        return
    if param.numel() == 0:
        return
    rounded = [is_stochastic and tensor.dtype == torch.bfloat16 for tensor in stored]
    _adamw_kernel[(triton.cdiv(param.numel(), 4 * QUARTER),)](
        param, grad.contiguous(), exp_avg, exp_avg_sq, lr, step, found_inf, grad_factor, param.numel(),
        1 - beta1, 1 - beta2, _log(beta1), _log(beta2), eps, weight_decay, seed,
        ROUND_PARAM=rounded[0], ROUND_FIRST=rounded[1], ROUND_SECOND=rounded[2], QUARTER=QUARTER, NUM_ROUNDS=NUM_ROUNDS,
        num_warps=8,
    )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


@torch.library.custom_op("titan_moe::adamw", mutates_args=("params", "exp_avgs", "exp_avg_sqs"), device_types="cuda")
def adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    lr: Tensor,
    steps: list[Tensor],
    found_inf: Tensor,
    grad_factor: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    seeds: list[int],
    is_stochastic: bool = True,
) -> None:
    """Take an AdamW step in place on every shard: in Triton on a GPU, the reference on a CPU.

    A shard's parameter, gradient and moments have one shape, and each its own dtype, fp32 or bf16 (on a CPU fp64 too).
    On the device, each a scalar: lr; a shard's step, the number of this one, fp32, 1 for the first: the caller counts,
    and not what is skipped; found_inf, fp32, 0 to take the step and 1 to leave everything bit for bit as it is;
    grad_factor, which multiplies the gradient. A shard's seed (below 2^63) makes its random bits, with the step: no
    two shards should share one. `is_stochastic` = False rounds bf16 to nearest, for comparisons.
    """
    options = (beta1, beta2, eps, weight_decay)
    for p, g, m, v, step, seed in zip(params, grads, exp_avgs, exp_avg_sqs, steps, seeds, strict=True):
        launch_adamw(p, g, m, v, lr, step, found_inf, grad_factor, *options, seed, is_stochastic)


@adamw.register_kernel("cpu")
def _(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    lr: Tensor,
    steps: list[Tensor],
    found_inf: Tensor,
    grad_factor: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    seeds: list[int],
    is_stochastic: bool = True,
) -> None:
    options = (beta1, beta2, eps, weight_decay)
    for p, g, m, v, step, seed in zip(params, grads, exp_avgs, exp_avg_sqs, steps, seeds, strict=True):
        adamw_reference(p, g, m, v, lr, step, found_inf, grad_factor, *options, seed, is_stochastic)


adamw.register_fake(lambda *args, **options: None)


def _on_one(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *args: Any) -> Tensor:
    """The operation on a single shard, as the registry wants it: it returns what it changes."""
    lr, step, found_inf, grad_factor, beta1, beta2, eps, weight_decay, seed = args
    options = (beta1, beta2, eps, weight_decay, [seed])
    adamw([param], [grad], [exp_avg], [exp_avg_sq], lr, [step], found_inf, grad_factor, *options)
    return param


def _reference_on_one(param: Tensor, *args: Any) -> Tensor:
    adamw_reference(param, *args)
    return param


def _arguments(device: torch.device, shape: tuple[int, ...], dtypes: list[torch.dtype]) -> list[Any]:
    """Random tensors in the dtypes of parameter, gradient and moments, in the middle of a run."""
    tensors = [torch.randn(shape, device=device, dtype=dtype) for dtype in dtypes]
    tensors[3].abs_()
    scalars = [torch.tensor(value, device=device) for value in (0.01, 7.0, 0.0, 0.5)]
    return [*tensors, *scalars, 0.9, 0.999, 1e-8, 0.1, 2**40 + 1]


def _samples(dtypes: Callable[[torch.dtype], list[torch.dtype]]) -> Callable[[torch.device, torch.dtype], list[Sample]]:
    def draw(device: torch.device, dtype: torch.dtype) -> list[Sample]:
        shapes = {"odd": (3, 5, 7), "one": (1,), "empty": (0, 4), "blocks": (4 * QUARTER + 3,)}
        samples = {name: _arguments(device, shape, dtypes(dtype)) for name, shape in shapes.items()}
        skipped = samples["skipped"] = _arguments(device, (33,), dtypes(dtype))
        skipped[1].fill_(torch.nan)
        skipped[6].fill_(1.0)
        strided = samples["strided"] = _arguments(device, (33, 5), dtypes(dtype))
        strided[:4] = [tensor.T for tensor in strided[:4]]
        return [Sample(name, tuple(args), 0) for name, args in samples.items()]

    return draw


SHARD_NUMEL = 16 * 2 * 768 * 2048
"""The gate and up projections of 16 experts of Qwen3-30B-A3B: what one of eight ranks holds of a layer."""


def _benchmark(name: str, bytes_moved: float, dtypes: list[torch.dtype]) -> Benchmark:
    def draw(device: torch.device) -> Sample:
        return Sample(name, tuple(_arguments(device, (SHARD_NUMEL,), dtypes)), 0)

    moved = bytes_moved * SHARD_NUMEL
    return Benchmark(name, draw, 0, 0, moved, moved)


def _torch_fused(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *args: Any) -> Tensor:
    """torch's own kernel on what is clipped already."""
    lr, step, found_inf, _, beta1, beta2, eps, weight_decay, _ = args
    options = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    torch._fused_adamw_(
        [param], [grad], [exp_avg], [exp_avg_sq], [], [step],
        lr=lr, amsgrad=False, maximize=False, found_inf=found_inf, **options,
    )  # fmt: skip
    return param


def _all_alike(dtype: torch.dtype) -> list[torch.dtype]:
    return [dtype] * 4


def _bf16_moments(dtype: torch.dtype) -> list[torch.dtype]:
    return [dtype, dtype, torch.bfloat16, torch.bfloat16]


register(
    Kernel(
        "adamw",
        _on_one,
        _reference_on_one,
        _samples(_all_alike),
        benchmarks=(
            _benchmark("fp32", 28, _all_alike(torch.float32)),
            _benchmark("bf16", 14, _all_alike(torch.bfloat16)),
        ),
        baselines={"torch fused": _torch_fused},
    )
)
register(
    Kernel(
        "adamw_bf16_moments",
        _on_one,
        _reference_on_one,
        _samples(_bf16_moments),
        dtypes=(torch.float32,),
        benchmarks=(_benchmark("qwen3_ep8", 20, _bf16_moments(torch.float32)),),
    )
)
