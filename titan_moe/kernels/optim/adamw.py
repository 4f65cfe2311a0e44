"""AdamW (arXiv:1711.05101) for all shards of a parameter group in one op, each shard in one pass over memory.

Physics: memory-bound. Each element reads and writes the parameter and two moments and reads the gradient: 7·4 = 28
bytes in fp32, 4 + 4 + 4 + 4·2 = 20 with bf16 moments, 7·2 = 14 all in bf16. Gradient clipping needs no pass of its own:
its coefficient multiplies the gradient as it is read, which saves 8 bytes an element. With an eighth of Qwen3-30B on a
rank, a step moves 76 GB (bf16 moments), 16 ms on an H200. An element takes 35 instructions in fp32, 60 with bf16
moments and 75 all in bf16 (sm_90 code); an H200 issues 170, 120 and 85 while it moves the bytes. One launch a tensor is
enough: 48 layers have some 500 shards, an average shard keeps the GPU busy for 30 us, longer than the next launch
takes, and a captured step has no launch cost. One op a tensor is not enough: PyTorch's dispatch of it costs the host
more than 30 us. So one op takes all shards. Aim: memory bandwidth. A split master moves as many bytes as
one in fp32.

Math is fp32, the bias corrections are fp64. bf16 values are stored with stochastic rounding (stochastic_rounding.py).
It is needed: at beta2 = 0.999 and zero gradient, a second moment shrinks by a thousandth a step. Rounding to nearest
drops changes below 2 to 4 thousandths, so the moment would never shrink and its parameter's steps would stay too small.
A bf16 parameter loses its updates in the same way at a low learning rate. The update uses the moments before rounding.

Everything that changes from step to step is on the device: a captured step reads the learning rate, the step number,
the clipping coefficient and `found_inf` anew. Where `found_inf` is not 0, nothing is read or written.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.optim.split_master import load_master, merge_reference, split_reference, store_master
from titan_moe.kernels.optim.stochastic_rounding import (
    NUM_ROUNDS,
    QUARTER,
    draw_words,
    draw_words_reference,
    round_to_bf16,
    round_to_bf16_reference,
)
from titan_moe.kernels.registry import Kernel, register

MOMENTS_STREAM, PARAM_STREAM = 0, 1


class Shard(NamedTuple):
    """A parameter's shard and its state, tensors of one shape; each dtype is fp32 or bf16 (fp64 too on a CPU)."""

    step: Tensor
    """fp32 scalar, the number of this step, 1 for the first. The caller increments it, and not for skipped steps."""
    seed: int
    """Below 2^63. Seed and step determine the random bits; no two shards should share a seed."""
    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    remainder: Tensor | None = None
    """int16: what the bf16 parameter lacks of its fp32 master (split_master.py), which is never rounded at random."""

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """What a step changes."""
        return (self.param, self.exp_avg, self.exp_avg_sq, *([] if self.remainder is None else [self.remainder]))


class Rule(NamedTuple):
    """How all shards step. Tensors are scalars on the device."""

    lr: Tensor
    found_inf: Tensor
    """fp32: 0 to take the step, 1 to leave everything bit for bit as it is."""
    grad_factor: Tensor
    """Multiplies the gradients."""
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    is_stochastic: bool = True
    """False rounds bf16 to nearest, for comparisons."""


def adamw_reference(shard: Shard, rule: Rule) -> None:
    """AdamW on one shard in at least fp32, with the kernel's random bits."""
    step, seed, param, grad, exp_avg, exp_avg_sq, remainder = shard
    wide = torch.promote_types(param.dtype, torch.float32)
    master = param.to(wide) if remainder is None else merge_reference(param, remainder)
    corrections = [1 - torch.pow(beta, step.double()) for beta in (rule.beta1, rule.beta2)]
    gradient = grad.to(wide) * rule.grad_factor.to(wide)
    first = torch.lerp(exp_avg.to(wide), gradient, 1 - rule.beta1)
    second = torch.lerp(exp_avg_sq.to(wide), gradient.square(), 1 - rule.beta2)
    denominator = (second / corrections[1].to(wide)).sqrt() + rule.eps
    update = first / corrections[0].to(wide) / denominator + rule.weight_decay * master
    master = master - rule.lr.to(wide) * update
    weight, *rest = (master,) if remainder is None else split_reference(master)
    values = (weight, first, second, *rest)
    bits: list[Tensor | None] = [None] * len(values)
    if rule.is_stochastic and torch.bfloat16 in (tensor.dtype for tensor in shard.stored):
        moments = draw_words_reference(param.numel(), seed, step, MOMENTS_STREAM).view(param.shape)
        bits[:3] = [  # the weight of a split master has no digits to drop
            draw_words_reference(param.numel(), seed, step, PARAM_STREAM).view(param.shape) & 0xFFFF,
            moments & 0xFFFF,
            moments >> 16,
        ]
    for tensor, value, random_bits in zip(shard.stored, values, bits, strict=True):
        is_rounded = random_bits is not None and tensor.dtype == torch.bfloat16
        new = round_to_bf16_reference(value, random_bits) if is_rounded else value.to(tensor.dtype)
        tensor.copy_(torch.where(rule.found_inf != 0, tensor, new))


@triton.jit
def _store(ptr, value, bits, keep, IS_ROUNDED: tl.constexpr):
    if IS_ROUNDED:
        tl.store(ptr, round_to_bf16(value, bits), mask=keep)
    else:
        tl.store(ptr, value.to(ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["seed"])
def _adamw_kernel(
    param_ptr, remainder_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr,
    lr_ptr, step_ptr, found_inf_ptr, grad_factor_ptr, numel,
    one_minus_beta1, one_minus_beta2, log_beta1, log_beta2, eps, weight_decay, seed,
    ROUND_PARAM: tl.constexpr, ROUND_FIRST: tl.constexpr, ROUND_SECOND: tl.constexpr, QUARTER: tl.constexpr,
    NUM_ROUNDS: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf_ptr) != 0:
        return
    step = tl.load(step_ptr)
    grad_factor = tl.load(grad_factor_ptr).to(tl.float32)
    lr = tl.load(lr_ptr).to(tl.float32)
    # fp64: with beta close to 1 the corrections lose digits in fp32; a few scalars a program cost nothing
    count = step.to(tl.float64)
    step_size = lr / (1 - tl.exp(count * log_beta1)).to(tl.float32)
    inv_root_correction = 1 / tl.sqrt((1 - tl.exp(count * log_beta2)).to(tl.float32))
    block = tl.program_id(0).to(tl.int64)
    moment_words = draw_words(seed, block, step, 0, QUARTER, NUM_ROUNDS, ROUND_FIRST or ROUND_SECOND)
    param_words = draw_words(seed, block, step, 1, QUARTER, NUM_ROUNDS, ROUND_PARAM)
    for quarter in tl.static_range(4):
        index = (block * 4 + quarter) * QUARTER + tl.arange(0, QUARTER)
        keep = index < numel
        param = load_master(param_ptr, remainder_ptr, index, keep, IS_SPLIT)
        grad = tl.load(grad_ptr + index, mask=keep, other=0.0).to(tl.float32) * grad_factor
        first = tl.load(exp_avg_ptr + index, mask=keep, other=0.0).to(tl.float32)
        second = tl.load(exp_avg_sq_ptr + index, mask=keep, other=0.0).to(tl.float32)
        first += one_minus_beta1 * (grad - first)
        second += one_minus_beta2 * (grad * grad - second)
        # approximate sqrt and division: an error of 2 ulp of the update is far below 1 ulp of the parameter
        param -= step_size * first / (tl.sqrt(second) * inv_root_correction + eps) + lr * weight_decay * param
        if IS_SPLIT:
            store_master(param_ptr, remainder_ptr, param, index, keep)
        else:
            _store(param_ptr + index, param, param_words[quarter] & 0xFFFF, keep, ROUND_PARAM)
        _store(exp_avg_ptr + index, first, moment_words[quarter] & 0xFFFF, keep, ROUND_FIRST)
        _store(exp_avg_sq_ptr + index, second, moment_words[quarter] >> 16, keep, ROUND_SECOND)


def launch_adamw(shard: Shard, rule: Rule) -> None:
    """The reference in Triton: fp32 and bf16 in, fp32 inside."""
    if torch.float64 in (tensor.dtype for tensor in (shard.grad, *shard.stored)):
        raise ValueError(
            "AdamW in Triton computes in fp32 and was given fp64; take torch.optim.AdamW, or the reference"
        )
    if not all(tensor.is_contiguous() for tensor in shard.stored):
        # no parameter of this package is strided; copying keeps the kernel one-dimensional
        dense = Shard(shard.step, shard.seed, *(it if it is None else it.contiguous() for it in shard[2:]))
        launch_adamw(dense, rule)
        for tensor, copy in zip(shard.stored, dense.stored, strict=True):
            tensor.copy_(copy)
        return
    if shard.param.numel() == 0:
        return
    rounded = [rule.is_stochastic and tensor.dtype == torch.bfloat16 for tensor in shard.stored[:3]]
    is_split = shard.remainder is not None
    remainder = shard.param if shard.remainder is None else shard.remainder
    _adamw_kernel[(triton.cdiv(shard.param.numel(), 4 * QUARTER),)](
        shard.param, remainder, shard.grad.contiguous(), shard.exp_avg, shard.exp_avg_sq,
        rule.lr, shard.step, rule.found_inf, rule.grad_factor, shard.param.numel(),
        1 - rule.beta1, 1 - rule.beta2, _log(rule.beta1), _log(rule.beta2), rule.eps, rule.weight_decay, shard.seed,
        ROUND_PARAM=rounded[0] and not is_split, ROUND_FIRST=rounded[1], ROUND_SECOND=rounded[2],
        QUARTER=QUARTER, NUM_ROUNDS=NUM_ROUNDS, IS_SPLIT=is_split, num_warps=8,
    )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


@torch.library.custom_op("titan_moe::adamw", mutates_args=("params", "exp_avgs", "exp_avg_sqs", "remainders"))
def _adamw(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    remainders: list[Tensor], lr: Tensor, steps: list[Tensor], found_inf: Tensor, grad_factor: Tensor,
    beta1: float, beta2: float, eps: float, weight_decay: float, seeds: list[int], is_stochastic: bool = True,
) -> None:  # fmt: skip
    rule = Rule(lr, found_inf, grad_factor, beta1, beta2, eps, weight_decay, is_stochastic)
    for shard in map(Shard, steps, seeds, params, grads, exp_avgs, exp_avg_sqs, remainders or [None] * len(params)):
        (launch_adamw if shard.param.is_cuda else adamw_reference)(shard, rule)


_adamw.register_fake(lambda *args, **options: None)


def adamw(shards: Sequence[Shard], rule: Rule) -> None:
    """Take an AdamW step in place on every shard: Triton on a GPU, the reference on a CPU. Either all masters are split
    or none."""
    steps, seeds, *tensors, remainders = map(list, zip(*shards, strict=True))
    lr, found_inf, grad_factor, *options, is_stochastic = rule
    split = [remainder for remainder in remainders if remainder is not None]
    _adamw(*tensors, split, lr, steps, found_inf, grad_factor, *options, seeds, is_stochastic)


def _updated(update: Callable[[Shard, Rule], None]) -> Callable[[Shard, Rule], Tensor]:
    """An update that returns the parameter, for the registry."""

    def op(shard: Shard, rule: Rule) -> Tensor:
        update(shard, rule)
        return shard.param

    return op


register(Kernel("adamw", _updated(lambda shard, rule: adamw([shard], rule)), _updated(adamw_reference)))
