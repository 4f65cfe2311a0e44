"""Round fp32 to bf16 at random, up or down, so that the mean of many roundings is the number itself.

N elements

Why: bf16 keeps 8 bits of a number, so that rounding to nearest forgets whatever moves it by less than 2 to 4
thousandths. A sum of many small steps then stands still; rounded at random, it moves by a whole digit now and then, and
by the right amount on average (arXiv:2010.06192). The chance of the way up is the share of the way: the 16 bits that
bf16 drops are added to 16 random ones, and the carry decides.

The random bits come from Philox 4x32 (Salmon et al., SC 2011) with seven rounds, the fewest that pass its authors'
tests: a function of a key and a counter. No state is kept, every element finds its bits by its place, and the step is a
part of the counter that kernels read from the device, so that the replay of a captured step draws anew, and a rerun of
a run the same. Physics: a call makes 128 bits in some 60 instructions, half of what an H200 issues an element while it
streams 20 bytes of it. So four elements share a call, 32 bits each, enough to round two numbers. Element i of a block
of 4·QUARTER takes word i / QUARTER of the call that element i % QUARTER counts: neighbours in memory are neighbours in
a warp.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

QUARTER = 1024
"""Elements that take the same word of their calls; a block has four times as many."""
WORD = 0xFFFFFFFF
ROUND_FACTORS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 7


def philox_reference(seed: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words for every counter, all of them 32 bits in int64, which no product here overflows."""
    c0, c1, c2, c3 = counter
    keys = [seed & WORD, seed >> 32 & WORD]
    for _ in range(NUM_ROUNDS):
        (high0, low0), (high2, low2) = _product(ROUND_FACTORS[0], c0), _product(ROUND_FACTORS[1], c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ keys[0], low2, high0 ^ c3 ^ keys[1], low0
        keys = [(key + step) & WORD for key, step in zip(keys, KEY_STEPS, strict=True)]
    return c0, c1, c2, c3


def _product(factor: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a product of 32 and 32 bits."""
    top, bottom = factor * (words >> 16), factor * (words & 0xFFFF)
    return (top + (bottom >> 16)) >> 16, (((top & 0xFFFF) << 16) + bottom) & WORD


def draw_words_reference(numel: int, seed: int, step: Tensor, stream: int) -> Tensor:
    """The word of each element of a flat tensor in a step: int64 [N] of 32 bits; streams are independent draws."""
    num_blocks = -(-numel // (4 * QUARTER))
    index = torch.arange(num_blocks * QUARTER, device=step.device)
    counter = (index & WORD, index >> 32, step.long().expand_as(index), torch.full_like(index, stream))
    words = philox_reference(seed, counter)
    return torch.stack([word.view(num_blocks, QUARTER) for word in words], dim=1).flatten()[:numel]


def round_to_bf16_reference(x: Tensor, bits: Tensor) -> Tensor:
    """Round by 16 random bits an element; infinity and what bf16 can hold stay as they are, NaN stays NaN."""
    x = x.float()
    carried = (x.view(torch.int32) + bits.int()) & ~0xFFFF
    return torch.where(x.isnan(), x, carried.view(torch.float32)).bfloat16()


@triton.jit
def draw_words(
    seed, block, step, stream: tl.constexpr, QUARTER: tl.constexpr, NUM_ROUNDS: tl.constexpr, IS_WANTED: tl.constexpr
):
    """Four words [QUARTER] for a block of four times as many elements; zeros where none are wanted."""
    zeros = tl.zeros((QUARTER,), dtype=tl.uint32)
    if not IS_WANTED:
        return zeros, zeros, zeros, zeros
    else:
        index = block.to(tl.int64) * QUARTER + tl.arange(0, QUARTER)
        low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
        return tl.philox(seed, low, high, zeros + step.to(tl.uint32), zeros + stream, NUM_ROUNDS)


@triton.jit
def round_to_bf16(x, bits):
    """The reference, on fp32 and uint32; the cast at the end is exact."""
    carried = ((x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(x == x, carried, x).to(tl.bfloat16)
