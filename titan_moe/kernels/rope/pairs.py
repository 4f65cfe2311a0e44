"""Load and store tiles of the pairs that RoPE rotates.

R pairs of a head · a row of a tile is one head of one token

Physics: the two elements of a pair are half a head apart, and each of two loads is contiguous; or they are neighbours
(interleaved), and one load reads both and is split within a thread. Offsets are 64-bit; R need not be a power of two.
"""

import triton
import triton.language as tl

TILE_PAIRS = 1024


def tile_shape(num_pairs: int) -> tuple[int, int]:
    """Rows and pairs of a tile: 16 elements a thread of four warps."""
    block_r = triton.next_power_of_2(num_pairs)
    return max(TILE_PAIRS // block_r, 1), block_r


@triton.jit
def load_pairs(ptr, offset, is_row, R: tl.constexpr, BLOCK_R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load both elements of each pair in fp32: offset and mask [rows, 1] -> two tensors [rows, pairs]."""
    if INTERLEAVED:
        element = tl.arange(0, 2 * BLOCK_R)[None, :]
        both = tl.load(ptr + offset + element, mask=is_row & (element < 2 * R), other=0.0)
        a, b = tl.split(tl.reshape(both, (offset.shape[0], BLOCK_R, 2)))
    else:
        pair = tl.arange(0, BLOCK_R)[None, :]
        keep = is_row & (pair < R)
        a = tl.load(ptr + offset + pair, mask=keep, other=0.0)
        b = tl.load(ptr + offset + R + pair, mask=keep, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def store_pairs(ptr, offset, is_row, a, b, R: tl.constexpr, BLOCK_R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The inverse of `load_pairs`: store both elements of each pair in the memory's dtype."""
    a, b = a.to(ptr.dtype.element_ty), b.to(ptr.dtype.element_ty)
    if INTERLEAVED:
        element = tl.arange(0, 2 * BLOCK_R)[None, :]
        both = tl.reshape(tl.join(a, b), (offset.shape[0], 2 * BLOCK_R))
        tl.store(ptr + offset + element, both, mask=is_row & (element < 2 * R))
    else:
        pair = tl.arange(0, BLOCK_R)[None, :]
        keep = is_row & (pair < R)
        tl.store(ptr + offset + pair, a, mask=keep)
        tl.store(ptr + offset + R + pair, b, mask=keep)


@triton.jit
def load_angles(cos_ptr, sin_ptr, position, is_row, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """Cosine and sine of each row's position, [rows, pairs]."""
    pair = tl.arange(0, BLOCK_R)[None, :]
    angle, keep = position * R + pair, is_row & (pair < R)
    return tl.load(cos_ptr + angle, mask=keep, other=0.0), tl.load(sin_ptr + angle, mask=keep, other=0.0)
