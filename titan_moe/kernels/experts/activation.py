"""SwiGLU in Triton (config/swiglu.py), for the kernels that have pre-activations in registers. Its reference is in
swiglu.py.

A number of the activation is a constant of the kernel. Those of the plain activation leave no instruction.
"""

import triton
import triton.language as tl


@triton.jit
def clamp(gate, up, LIMIT: tl.constexpr):
    """Gate from above, up from both sides; NaN stays."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate, up


@triton.jit
def forward(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr):
    """Both factors of the activation: gate times its sigmoid, and up."""
    gate, up = clamp(gate, up, LIMIT)
    silu = gate * tl.sigmoid(gate) if ALPHA == 1.0 else gate * tl.sigmoid(ALPHA * gate)
    return silu, up if UP_OFFSET == 0.0 else up + UP_OFFSET


@triton.jit
def backward(gate, up, dactive, LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr):
    """The gradients of gate and up; none where they are clamped."""
    clamped_gate, clamped_up = clamp(gate, up, LIMIT)
    sigmoid = tl.sigmoid(clamped_gate) if ALPHA == 1.0 else tl.sigmoid(ALPHA * clamped_gate)
    silu = clamped_gate * sigmoid
    factor = clamped_up if UP_OFFSET == 0.0 else clamped_up + UP_OFFSET
    slope = silu * (1 - sigmoid) if ALPHA == 1.0 else ALPHA * (silu * (1 - sigmoid))
    dgate, dup = dactive * factor * (sigmoid + slope), dactive * silu
    if LIMIT > 0:
        dgate = tl.where(gate > LIMIT, 0.0, dgate)
        dup = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, dup)
    return dgate, dup
