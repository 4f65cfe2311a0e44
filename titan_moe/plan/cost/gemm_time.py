"""Times of kernels on one GPU: GEMMs of linear layers and of experts, attention, passes over memory. All in seconds."""

from typing import NamedTuple

from titan_moe.plan.cost.rates import Rates

NARROW, NARROW_EXPERTS = 60, 150
"""Widths at which a GEMM loses half of its rate: starting and ending a sum over so many products takes as long."""
ROWS_OF_A_TILE = 128
DIAGONAL_FORWARD, DIAGONAL_BACKWARD = 300, 600
"""Tokens of a sequence at which causal attention loses half: blocks on the diagonal are computed whole."""
WINDOWS = 0.7
"""FlexAttention's rate over cuDNN's."""
BLOCKWISE = 1.2
"""The time of experts and linear layers in blockwise fp8 over that in rowwise fp8."""
EXPERTS_OF_TORCH, CODES_OF_TORCH = 1.12, 1.6
"""The time of experts that are not fused over that of those that are (plan/tables), in bf16 and in fp8."""


class Passes(NamedTuple):
    """Seconds of the parts of a forward and backward."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.backward_input + self.backward_weight

    def plus(self, other: "Passes") -> "Passes":
        """The sum of both, part by part."""
        return Passes(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    def times(self, factor: float) -> "Passes":
        """Each so many times as long."""
        return Passes(*(factor * part for part in self))


def linear_seconds(rates: Rates, rows: float, widths: tuple[int, int], *, has_codes: bool) -> float:
    """One GEMM of a linear layer, with a third of what quantising its operands takes in forward and backward."""
    flops = 2.0 * rows * widths[0] * widths[1]
    if not rows:
        return 0.0
    filled = rows / (rows + ROWS_OF_A_TILE) / (1 + NARROW / max(min(widths), 1))
    if not has_codes:
        return flops / (rates.dense * filled)
    codes = 4 * rows * sum(widths) + 4 * widths[0] * widths[1]
    return flops / (rates.dense_codes * filled) + codes / rates.memory / 3


def expert_passes(
    rates: Rates, slots: float, rows: float, num_experts: int, widths: tuple[int, int], *, has_codes: bool
) -> Passes:
    """Experts of a layer on one rank: gated MLPs of so many slots in all, which read so many rows."""
    width, hidden = widths
    if not slots:
        return Passes()
    of_one = slots / max(num_experts, 1)
    filled = of_one / (of_one + ROWS_OF_A_TILE / 2) / (1 + NARROW_EXPERTS / max(min(width, hidden), 1))
    gemms = 6.0 * slots * width * hidden / ((rates.grouped_codes if has_codes else rates.grouped) * filled)
    sums = 2 * width * (slots + rows) / rates.memory  # of a row's slots
    if not has_codes:
        activations = 12 * slots * hidden / rates.memory
        return Passes(gemms + sums, gemms + sums + activations, gemms)
    codes = 21 * slots * hidden / rates.memory / 3
    rounded = 3 * width * (slots + rows) / rates.memory / 3
    return Passes(gemms + sums + codes + rounded, gemms + sums + codes + rounded, gemms + codes + rounded)


def attention_passes(rates: Rates, flops: float, num_tokens: int, *, is_windowed: bool) -> Passes:
    """Attention without projections of so many FLOPs in forward, in sequences of so many tokens."""
    share = WINDOWS if is_windowed else 1.0
    forward = flops * (1 + DIAGONAL_FORWARD / num_tokens) / (rates.attention_forward * share)
    backward = 2 * flops * (1 + DIAGONAL_BACKWARD / num_tokens) / (rates.attention_backward * share)
    return Passes(forward, backward)
