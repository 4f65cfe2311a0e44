"""Times of adapters and of frozen weights in codes, by the bytes that their kernels move. All in seconds.

T tokens · S rows · R expert slots · I inputs · O outputs · D width of a row · F hidden width · r rank

GEMMs of rank r make r FLOPs a byte of what they read, and are bound by memory up to ranks of 200. What is counted are
the passes of kernels/experts/adapted_fused_mlp.py, kernels/linear/adapted.py and adapters/low_rank.py, in elements of
compute's dtype.
"""

from titan_moe.config.modules import Module
from titan_moe.plan.cost.gemm_time import Passes
from titan_moe.plan.cost.rates import Rates

MADE = 1
"""Bytes that are read to make a number of a code; what is written is an element."""


def linear_adapter(
    rates: Rates, tokens: float, widths: tuple[int, int], num_matrices: int, rank: int, *, is_joined: bool = False
) -> Passes:
    """The adapter beside a linear layer.

    Where it `is_joined` to the layer's GEMM, forward reads x and writes B A x, which the GEMM reads; backward reads the
    gradient for B and for A x, x for A, and writes the gradient of x, which the GEMM reads.

    Else it stands apart. Forward reads x and writes B A x (twice more of a fused weight, whose parts are joined), and
    adds it in a pass of three. Backward reads the gradient for B and for A x, x for A, and adds the gradient of x in a
    pass of three, which was written before.
    """
    inputs, outputs = widths
    flops = 2.0 * tokens * rank * (num_matrices * inputs + outputs)
    forward = tokens * (inputs + outputs * (4 + 2 * (num_matrices > 1)))
    of_input, of_factors = tokens * (outputs + 4 * inputs), tokens * (outputs + inputs)
    if is_joined:
        forward, of_input = tokens * (inputs + 2 * outputs), tokens * (outputs + 2 * inputs)
    return Passes(*(_longer(rates, elements, flops) for elements in (forward, of_input, of_factors)))


def expert_adapter(rates: Rates, slots: float, widths: tuple[int, int], rank: int) -> Passes:
    """The factors of routed experts.

    Products with first factors read what they multiply: forward rows and activations, backward gradients of both and of
    gate and up. Gradients of two factors read rows and their gradients; those of the others are made where activations
    are, which are not written then: one element of the hidden width less. Products with second factors are made in
    GEMMs of weights, of gate and up with zeros for the other's; they read nothing but what is narrow.
    """
    width, hidden = widths
    first = 2.0 * slots * rank
    forward = _longer(rates, slots * (width + hidden), first * (2 * width + hidden))
    of_input = _longer(rates, slots * (width + hidden), first * (width + 2 * hidden))
    of_factors = _longer(rates, slots * 2 * width, 3 * first * (width + hidden))
    second = first / rates.grouped
    return Passes(forward + second * (width + 4 * hidden), of_input + second * (2 * width + hidden), of_factors)


def _longer(rates: Rates, elements: float, flops: float, size: int = 2) -> float:
    return max(elements * size / rates.memory, flops / rates.grouped)


def made_numbers(rates: Rates, row: Module, element: int) -> Passes:
    """The numbers of a weight in codes, made for the product of forward and for that of backward."""
    one = row.own_parameters * (MADE + element) / rates.memory
    return Passes(one, one)
