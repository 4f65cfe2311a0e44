"""AdamW as in adamw.py, with both moments in 8 bits (moments_8bit.py), each shard in one pass over memory.

Physics: memory-bound. An fp32 parameter moves 4 + 4 + 4 + 4·1 = 16 bytes, 20 with bf16 moments, 28 with fp32 ones;
scales add 0.06. A block of 256 elements needs the largest magnitude of its new moments before it stores any, so a
program keeps four blocks in registers at a time. On an H200 it takes as long as with bf16 moments (tools/results):
what it saves is memory. Aim: memory bandwidth.

One op takes all shards, and everything that changes from step to step is on the device, as in adamw.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.optim.adamw import (
    MOMENTS_STREAM,
    Rule,
    Shard,
    _log,
    _store,
    adamw_reference,
)
from titan_moe.kernels.optim.moments_8bit import (
    BLOCK,
    NEAREST,
    Moment,
    dequantize_reference,
    load_moment,
    quantize_reference,
    store_moment,
)
from titan_moe.kernels.optim.split_master import load_master, store_master
from titan_moe.kernels.optim.stochastic_rounding import NUM_ROUNDS, QUARTER, draw_words_at, draw_words_reference
from titan_moe.kernels.registry import Kernel, register


class Shard8(NamedTuple):
    """A parameter's shard and its state. The parameter is fp32 or bf16, and its size is a multiple of BLOCK."""

    step: Tensor
    """As in `Shard`, the number of this step."""
    seed: int
    """As in `Shard`."""
    param: Tensor
    grad: Tensor
    exp_avg: Moment
    exp_avg_sq: Moment
    remainder: Tensor | None = None
    """As in `Shard`."""


def adamw_8bit_reference(shard: Shard8, rule: Rule) -> None:
    """AdamW on dequantised moments, which are quantised again afterwards, with the kernel's random bits."""
    words = draw_words_reference(shard.param.numel(), shard.seed, shard.step, MOMENTS_STREAM)
    moments = shard.exp_avg, shard.exp_avg_sq
    first, second = map(dequantize_reference, moments)
    adamw_reference(Shard(shard.step, shard.seed, shard.param, shard.grad, first, second, shard.remainder), rule)
    of_moments = moments, (first, second), (words & 0xFFFF, words >> 16), (True, False)
    for moment, new, bits, is_signed in zip(*of_moments, strict=True):
        quantized = quantize_reference(new, bits if rule.is_stochastic else NEAREST, is_signed=is_signed)
        for stored, value in zip(moment, quantized, strict=True):
            stored.copy_(torch.where(rule.found_inf != 0, stored, value))


@triton.jit(do_not_specialize=["seed"])
def _adamw_8bit_kernel(
    param_ptr, remainder_ptr, grad_ptr, codes1_ptr, scales1_ptr, codes2_ptr, scales2_ptr,
    lr_ptr, step_ptr, found_inf_ptr, grad_factor_ptr, numel,
    one_minus_beta1, one_minus_beta2, log_beta1, log_beta2, eps, weight_decay, seed,
    ROUND_PARAM: tl.constexpr, ROUND_MOMENTS: tl.constexpr, QUARTER: tl.constexpr, BLOCK: tl.constexpr,
    NUM_ROUNDS: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf_ptr) != 0:
        return
    step = tl.load(step_ptr)
    grad_factor = tl.load(grad_factor_ptr).to(tl.float32)
    lr = tl.load(lr_ptr).to(tl.float32)
    count = step.to(tl.float64)
    step_size = lr / (1 - tl.exp(count * log_beta1)).to(tl.float32)
    inv_root_correction = 1 / tl.sqrt((1 - tl.exp(count * log_beta2)).to(tl.float32))
    program = tl.program_id(0).to(tl.int64)
    ROWS: tl.constexpr = QUARTER // BLOCK
    call = program * QUARTER + tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    moment_words = draw_words_at(call, seed, step, 0, NUM_ROUNDS, ROUND_MOMENTS)
    param_words = draw_words_at(call, seed, step, 1, NUM_ROUNDS, ROUND_PARAM)
    for quarter in tl.static_range(4):
        row = (program * 4 + quarter) * ROWS + tl.arange(0, ROWS)[:, None]
        index = row * BLOCK + tl.arange(0, BLOCK)[None, :]
        keep, keep_row = index < numel, row * BLOCK < numel
        bits = moment_words[quarter]
        if not ROUND_MOMENTS:
            bits += tl.full((ROWS, BLOCK), 0x80008000, tl.uint32)  # to nearest
        param = load_master(param_ptr, remainder_ptr, index, keep, IS_SPLIT)
        grad = tl.load(grad_ptr + index, mask=keep, other=0.0).to(tl.float32) * grad_factor
        first = load_moment(codes1_ptr, scales1_ptr, index, row, keep, keep_row)
        second = load_moment(codes2_ptr, scales2_ptr, index, row, keep, keep_row)
        first += one_minus_beta1 * (grad - first)
        second += one_minus_beta2 * (grad * grad - second)
        param -= step_size * first / (tl.sqrt(second) * inv_root_correction + eps) + lr * weight_decay * param
        if IS_SPLIT:
            store_master(param_ptr, remainder_ptr, param, index, keep)
        else:
            _store(param_ptr + index, param, param_words[quarter] & 0xFFFF, keep, ROUND_PARAM)
        store_moment(codes1_ptr, scales1_ptr, first, bits & 0xFFFF, index, row, keep, keep_row, True)
        store_moment(codes2_ptr, scales2_ptr, second, bits >> 16, index, row, keep, keep_row, False)


def launch_adamw_8bit(shard: Shard8, rule: Rule) -> None:
    """The reference in Triton."""
    if torch.float64 in (shard.param.dtype, shard.grad.dtype):
        raise ValueError("AdamW in Triton computes in fp32 and was given fp64; take the reference")
    param, is_split = shard.param.contiguous(), shard.remainder is not None
    remainder = shard.remainder.contiguous() if shard.remainder is not None else param
    if param.numel() == 0:
        return
    _adamw_8bit_kernel[(triton.cdiv(param.numel(), 4 * QUARTER),)](
        param, remainder, shard.grad.contiguous(), *shard.exp_avg, *shard.exp_avg_sq,
        rule.lr, shard.step, rule.found_inf, rule.grad_factor, param.numel(),
        1 - rule.beta1, 1 - rule.beta2, _log(rule.beta1), _log(rule.beta2), rule.eps, rule.weight_decay, shard.seed,
        ROUND_PARAM=rule.is_stochastic and param.dtype == torch.bfloat16 and not is_split,
        ROUND_MOMENTS=rule.is_stochastic, QUARTER=QUARTER, BLOCK=BLOCK, NUM_ROUNDS=NUM_ROUNDS, IS_SPLIT=is_split,
        num_warps=4,
    )  # fmt: skip
    if param is not shard.param:
        shard.param.copy_(param)
        if shard.remainder is not None:
            shard.remainder.copy_(remainder)


@torch.library.custom_op(
    "titan_moe::adamw_8bit", mutates_args=("params", "codes1", "scales1", "codes2", "scales2", "remainders")
)
def _adamw_8bit(
    params: list[Tensor], grads: list[Tensor], codes1: list[Tensor], scales1: list[Tensor], codes2: list[Tensor],
    scales2: list[Tensor], remainders: list[Tensor], lr: Tensor, steps: list[Tensor], found_inf: Tensor,
    grad_factor: Tensor,
    beta1: float, beta2: float, eps: float, weight_decay: float, seeds: list[int], is_stochastic: bool = True,
) -> None:  # fmt: skip
    rule = Rule(lr, found_inf, grad_factor, beta1, beta2, eps, weight_decay, is_stochastic)
    firsts, seconds = map(Moment, codes1, scales1), map(Moment, codes2, scales2)
    for shard in map(Shard8, steps, seeds, params, grads, firsts, seconds, remainders or [None] * len(params)):
        (launch_adamw_8bit if shard.param.is_cuda else adamw_8bit_reference)(shard, rule)


_adamw_8bit.register_fake(lambda *args, **options: None)


def adamw_8bit(shards: Sequence[Shard8], rule: Rule) -> None:
    """Take an AdamW step in place on every shard: Triton on a GPU, the reference on a CPU."""
    steps, seeds, params, grads, firsts, seconds, remainders = map(list, zip(*shards, strict=True))
    lr, found_inf, grad_factor, *options, is_stochastic = rule
    _adamw_8bit(
        params, grads, [first.codes for first in firsts], [first.scales_B for first in firsts],
        [second.codes for second in seconds], [second.scales_B for second in seconds],
        [remainder for remainder in remainders if remainder is not None],
        lr, steps, found_inf, grad_factor, *options, seeds, is_stochastic,
    )  # fmt: skip


def _op(shard: Shard8, rule: Rule) -> Tensor:
    adamw_8bit([shard], rule)
    return shard.param


def _reference(shard: Shard8, rule: Rule) -> Tensor:
    adamw_8bit_reference(shard, rule)
    return shard.param


register(Kernel("adamw_8bit", _op, _reference))
