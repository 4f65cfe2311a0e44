"""Packed rows: codes in e4m3 with their scales behind them, so that a row is sent and kept as one piece.

D width of a row · n scales of a row

A scale is fp32 and stands for a whole row, or for a block of 128 columns (arXiv:2412.19437, section 3.3.2). A packed
row is D codes, n scales, and bytes without meaning up to a multiple of 16, so that rows stay aligned. Whatever moves
rows moves packed rows, as elements of two bytes.
"""

import torch

CODES = torch.float8_e4m3fn
WHOLE_ROW = 0
"""Columns of a scale that stands for a row."""
BLOCK = 128
"""Columns of a scale that stands for a block; of weights and of gradients of weights, rows of a block too."""
TAIL_BYTES = 16
"""Behind the codes, a multiple of this; exactly this with one scale a row."""


def num_scales(width: int, columns: int) -> int:
    """Scales of a row of so many codes (n)."""
    return width // columns if columns else 1


def packed_width(width: int, columns: int) -> int:
    """Bytes of a packed row of so many codes."""
    return width + -(-4 * num_scales(width, columns) // TAIL_BYTES) * TAIL_BYTES


def codes_width(num_bytes: int, columns: int) -> int:
    """The inverse of `packed_width`: codes of a packed row of so many bytes."""
    if not columns:
        return num_bytes - TAIL_BYTES
    blocks = TAIL_BYTES // 4  # of a tail that is full
    full, rest = divmod(num_bytes, blocks * columns + TAIL_BYTES)
    return full * blocks * columns + rest // columns * columns
