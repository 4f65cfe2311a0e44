"""The pairs that a rotation turns, read from memory and written to it by tiles.

R pairs of a head · a row of a tile is one head of one token

Physics: a pair's elements lie half a head apart, so that each of the two reads is one whole stretch, or beside each
other, so that one read brings both and a thread keeps what it splits. Offsets are 64-bit; R need not be a power of two.
"""

import triton
import triton.language as tl

TILE_PAIRS = 1024


def tile_shape(num_pairs: int) -> tuple[int, int]:
    """Rows and pairs of a tile: 16 elements a thread of four warps."""
    block_r = triton.next_power_of_2(num_pairs)
    return max(TILE_PAIRS // block_r, 1), block_r


@triton.jit
def load_pairs(ptr, offset, pair, keep, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both elements of each pair, in fp32: [rows, 1] offsets and [pairs] -> twice [rows, pairs]."""
    if INTERLEAVED:
        element = 2 * pair[None, :, None] + tl.arange(0, 2)[None, None, :]
        a, b = tl.split(tl.load(ptr + offset[:, :, None] + element, mask=keep[:, :, None], other=0.0))
    else:
        a = tl.load(ptr + offset + pair[None, :], mask=keep, other=0.0)
        b = tl.load(ptr + offset + R + pair[None, :], mask=keep, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def store_pairs(ptr, offset, pair, keep, a, b, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The way back of `load_pairs`, in the memory's dtype."""
    a, b = a.to(ptr.dtype.element_ty), b.to(ptr.dtype.element_ty)
    if INTERLEAVED:
        element = 2 * pair[None, :, None] + tl.arange(0, 2)[None, None, :]
        tl.store(ptr + offset[:, :, None] + element, tl.join(a, b), mask=keep[:, :, None])
    else:
        tl.store(ptr + offset + pair[None, :], a, mask=keep)
        tl.store(ptr + offset + R + pair[None, :], b, mask=keep)


@triton.jit
def load_angles(cos_ptr, sin_ptr, position, pair, keep, R: tl.constexpr):
    """Cosine and sine of each row's position, [rows, pairs]."""
    angle = position[:, None] * R + pair[None, :]
    return tl.load(cos_ptr + angle, mask=keep, other=0.0), tl.load(sin_ptr + angle, mask=keep, other=0.0)


@triton.jit
def load_weights(weight_ptr, pair, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """A norm's weights, twice [1, pairs]."""
    return load_pairs(weight_ptr, tl.zeros((1, 1), tl.int32), pair, (pair < R)[None, :], R, INTERLEAVED)
