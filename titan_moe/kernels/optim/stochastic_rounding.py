"""Stochastic rounding of fp32 to bf16: up or down at random, so that the expected result is the fp32 number.

N elements

Why: bf16 keeps 8 significant bits, so rounding to nearest drops every change below 2 to 4 thousandths of a number. A
sum of many small steps then does not move. With stochastic rounding it moves by a whole bf16 step now and then, and by
the right amount on average (arXiv:2010.06192). The probability of rounding up is the dropped fraction: 16 random bits
are added to the 16 bits that bf16 drops, and the carry decides.

The random bits come from Philox 4x32 (Salmon et al., SC 2011) with seven rounds, the fewest that pass its authors'
tests. Philox is a function of a key and a counter, so no state is kept and an element's index gives its bits. The step
is part of the counter and is read on the device: replays of a captured step draw new bits, and a rerun of a run draws
the same ones.

Physics: a Philox call makes 128 bits in some 60 instructions, half of what an H200 issues for an element while it moves
20 bytes. So four elements share a call and get 32 bits each, enough to round two numbers. Element i of a block of
4·QUARTER elements takes word i / QUARTER of call i % QUARTER: consecutive elements belong to consecutive threads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

QUARTER = 1024
"""Elements of a block that take the same word of their Philox call; a block has four times as many."""
WORD = 0xFFFFFFFF
ROUND_FACTORS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 7


def philox_reference(seed: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words for each counter, 32 bits each in int64, where no product here overflows."""
    c0, c1, c2, c3 = counter
    keys = [seed & WORD, seed >> 32 & WORD]
    for _ in range(NUM_ROUNDS):
        (high0, low0), (high2, low2) = _product(ROUND_FACTORS[0], c0), _product(ROUND_FACTORS[1], c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ keys[0], low2, high0 ^ c3 ^ keys[1], low0
        keys = [(key + step) & WORD for key, step in zip(keys, KEY_STEPS, strict=True)]
    return c0, c1, c2, c3


def _product(factor: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a product of two 32-bit numbers."""
    top, bottom = factor * (words >> 16), factor * (words & 0xFFFF)
    return (top + (bottom >> 16)) >> 16, (((top & 0xFFFF) << 16) + bottom) & WORD


def draw_words_reference(numel: int, seed: int, step: Tensor, stream: int) -> Tensor:
    """The word of each element of a flat tensor in a step: 32 bits in int64 [N]. Streams are independent."""
    num_blocks = -(-numel // (4 * QUARTER))
    index = torch.arange(num_blocks * QUARTER, device=step.device)
    counter = (index & WORD, index >> 32, step.long().expand_as(index), torch.full_like(index, stream))
    words = philox_reference(seed, counter)
    return torch.stack([word.view(num_blocks, QUARTER) for word in words], dim=1).flatten()[:numel]


def round_to_bf16_reference(x: Tensor, bits: Tensor) -> Tensor:
    """Round with 16 random bits an element. Infinities, NaN and numbers that bf16 represents stay as they are."""
    x = x.float()
    carried = (x.view(torch.int32) + bits.int()) & ~0xFFFF
    return torch.where(x.isnan(), x, carried.view(torch.float32)).bfloat16()


@triton.jit
def draw_words(
    seed, block, step, stream: tl.constexpr, QUARTER: tl.constexpr, NUM_ROUNDS: tl.constexpr, IS_NEEDED: tl.constexpr
):
    """Four words [QUARTER] for a block of 4·QUARTER elements; zeros if `IS_NEEDED` is false."""
    return draw_words_at(
        block.to(tl.int64) * QUARTER + tl.arange(0, QUARTER), seed, step, stream, NUM_ROUNDS, IS_NEEDED
    )


@triton.jit
def draw_words_at(index, seed, step, stream: tl.constexpr, NUM_ROUNDS: tl.constexpr, IS_NEEDED: tl.constexpr):
    """`draw_words` for numbers of Philox calls in int64, of any shape."""
    zeros = tl.zeros_like(index).to(tl.uint32)
    if not IS_NEEDED:
        return zeros, zeros, zeros, zeros
    else:
        low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
        return tl.philox(seed, low, high, zeros + step.to(tl.uint32), zeros + stream, NUM_ROUNDS)


@triton.jit
def round_to_bf16(x, bits):
    """`round_to_bf16_reference` on fp32 and uint32; the cast at the end is exact."""
    carried = ((x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(x == x, carried, x).to(tl.bfloat16)
