"""The activation between the two projections of an expert, as a value."""

from typing import NamedTuple


class SwiGLU(NamedTuple):
    """(up + offset) * gate * sigmoid(alpha * gate), of clamped gate and up. The default is that of arXiv:2002.05202."""

    limit: float = 0.0
    """Gate is at most, up at most and its negative at least; 0 means no clamp."""
    alpha: float = 1.0
    up_offset: float = 0.0


PLAIN_SWIGLU = SwiGLU()
