"""Times of adapters and of frozen weights in codes, by the bytes that their kernels move. All in seconds.

T tokens · S rows · R expert slots · I inputs · O outputs · D width of a row · F hidden width · r rank

GEMMs of rank r make r FLOPs a byte of what they read, and are bound by memory up to ranks of 200. What is counted are
the passes of kernels/experts/adapted_fused_mlp.py and adapters/low_rank.py, in elements of compute's dtype.
"""

from titan_moe.config.modules import Module
from titan_moe.plan.cost.gemm_time import Passes
from titan_moe.plan.cost.rates import Rates

MADE = 1
"""Bytes that are read to make a number of a code; what is written is an element."""


def linear_adapter(rates: Rates, tokens: float, widths: tuple[int, int], num_matrices: int, rank: int) -> Passes:
    """The adapter beside a linear layer.

    Forward reads x and writes B A x (twice more of a fused weight, whose parts are joined), and adds it in a pass of
    three. Backward reads the gradient for B and for A x, x for A, and adds the gradient of x in a pass of three, which
    was written before.
    """
    inputs, outputs = widths
    flops = 2.0 * tokens * rank * (num_matrices * inputs + outputs)
    forward = tokens * (inputs + outputs * (4 + 2 * (num_matrices > 1)))
    of_input, of_factors = tokens * (outputs + 4 * inputs), tokens * (outputs + inputs)
    return Passes(*(_longer(rates, elements, flops) for elements in (forward, of_input, of_factors)))


def expert_adapter(rates: Rates, slots: float, widths: tuple[int, int], rank: int) -> Passes:
    """The factors of routed experts.

    Forward copies the rows of slots, 2 D, which A reads, D; the products of gate and up are written and read again, 4
    F; those of down read F, and are written and added, 4 D. Backward copies dy and reads it, 3 D; what is added to the
    gradients of F and D is written and added, 4 F and 4 D, and that of gate and up reads 2 F. Gradients of factors copy
    rows, 2 D, and read them and dy, activations twice, and the gradients of gate and up.
    """
    width, hidden = widths
    flops = 2.0 * slots * rank * (4 * width + 5 * hidden) / 1.5
    forward = slots * (7 * width + 5 * hidden)
    of_input, of_factors = slots * (7 * width + 6 * hidden), slots * (4 * width + 4 * hidden)
    return Passes(*(_longer(rates, elements, flops) for elements in (forward, of_input, of_factors)))


def _longer(rates: Rates, elements: float, flops: float, size: int = 2) -> float:
    return max(elements * size / rates.memory, flops / rates.grouped)


def made_numbers(rates: Rates, row: Module, element: int) -> Passes:
    """The numbers of a weight in codes, made for the product of forward and for that of backward."""
    one = row.own_parameters * (MADE + element) / rates.memory
    return Passes(one, one)
