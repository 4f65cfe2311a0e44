"""Load and store tiles of the pairs that RoPE rotates.

R pairs of a head, of which the first P are rotated · a row of a tile is one head of one token

Physics: the two elements of a pair are half a head apart, and each of two loads is contiguous; or they are neighbours
(interleaved), and one load reads both and is split within a thread. Where a part of a head is rotated, pairs of that
part are half of it apart, and the other elements are pairs half of the rest apart, whose angle is zero. Offsets are
64-bit; R and P need not be powers of two.
"""

import triton
import triton.language as tl

TILE_PAIRS = 1024


def tile_shape(num_pairs: int) -> tuple[int, int]:
    """Rows and pairs of a tile: 16 elements a thread of four warps."""
    block_r = triton.next_power_of_2(num_pairs)
    return max(TILE_PAIRS // block_r, 1), block_r


@triton.jit
def _places(pair, R: tl.constexpr, P: tl.constexpr):
    """Places in a head of both elements of each pair that is not interleaved."""
    if P == R:
        return pair, pair + R
    first = tl.where(pair < P, pair, pair + P)
    return first, first + tl.where(pair < P, P, R - P)


@triton.jit
def load_pairs(ptr, offset, is_row, R: tl.constexpr, P: tl.constexpr, BLOCK_R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load both elements of each pair in fp32: offset and mask [rows, 1] -> two tensors [rows, pairs]."""
    if INTERLEAVED:
        element = tl.arange(0, 2 * BLOCK_R)[None, :]
        both = tl.load(ptr + offset + element, mask=is_row & (element < 2 * R), other=0.0)
        a, b = tl.split(tl.reshape(both, (offset.shape[0], BLOCK_R, 2)))
    else:
        pair = tl.arange(0, BLOCK_R)[None, :]
        keep = is_row & (pair < R)
        first, second = _places(pair, R, P)
        a = tl.load(ptr + offset + first, mask=keep, other=0.0)
        b = tl.load(ptr + offset + second, mask=keep, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def store_pairs(
    ptr, offset, is_row, a, b, R: tl.constexpr, P: tl.constexpr, BLOCK_R: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The inverse of `load_pairs`: store both elements of each pair in the memory's dtype."""
    a, b = a.to(ptr.dtype.element_ty), b.to(ptr.dtype.element_ty)
    if INTERLEAVED:
        element = tl.arange(0, 2 * BLOCK_R)[None, :]
        both = tl.reshape(tl.join(a, b), (offset.shape[0], 2 * BLOCK_R))
        tl.store(ptr + offset + element, both, mask=is_row & (element < 2 * R))
    else:
        pair = tl.arange(0, BLOCK_R)[None, :]
        keep = is_row & (pair < R)
        first, second = _places(pair, R, P)
        tl.store(ptr + offset + first, a, mask=keep)
        tl.store(ptr + offset + second, b, mask=keep)


@triton.jit
def load_angles(cos_ptr, sin_ptr, position, is_row, P: tl.constexpr, BLOCK_R: tl.constexpr):
    """Cosine and sine of each row's position, [rows, pairs]: one and zero from pair P on."""
    pair = tl.arange(0, BLOCK_R)[None, :]
    angle, keep = position * P + pair, is_row & (pair < P)
    return tl.load(cos_ptr + angle, mask=keep, other=1.0), tl.load(sin_ptr + angle, mask=keep, other=0.0)
