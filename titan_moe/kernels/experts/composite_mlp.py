"""The expert MLP on rows: gather, gate and up, SwiGLU, score, down, sum of a row's slots.

S rows · R expert slots, sorted by expert · K choices a row · e experts that the rank computes · D width of a row ·
F hidden width

A compiler fuses what lies between the GEMMs. `fused` (fused_mlp.py) is Triton and keeps less for backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.experts.bias import add_bias
from titan_moe.kernels.experts.grouped_mm import GROUPED_GEMM, GroupedGemm
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.swiglu import weighted_swiglu
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.kernels.permute.rows import gather_rows, sum_slots

ExpertMLP = Callable[[Tensor, ExpertSlots, ExpertWeights], Tensor]
"""x_SD, slots, weights -> y_SD, zero for a row without a slot."""


@dataclass(frozen=True)
class CompositeMLP:
    """The MLP as gather, GEMM, SwiGLU, GEMM, sum, with biases if the experts have them.

    It can be pickled, as `torch.save` of a whole layer needs, with a GEMM of `GROUPED_GEMM`: that is stored by name.
    """

    gemm: GroupedGemm
    weighs_input: bool = False
    """Whether the score weighs the gathered rows (Llama 4), or the activation and the down bias."""
    activation: SwiGLU = PLAIN_SWIGLU

    def __call__(
        self, x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights, gemm: GroupedGemm | None = None
    ) -> Tensor:
        """-> y_SD. Another GEMM is called for gate and up first, and then for down."""
        gemm = gemm or self.gemm
        rows_R, slots_SK, scores_R, offsets_e = slots
        x_RD = gather_rows(x_SD, rows_R, slots_SK)
        if self.weighs_input:
            x_RD, scores_R = (x_RD * scores_R[:, None]).to(x_RD.dtype), torch.ones_like(scores_R)
        hidden_R2F = gemm(x_RD, *weights.gate_up.map(lambda weight: weight.flatten(1, 2)), offsets_e)
        if weights.gate_up_bias is not None:
            bias = weights.gate_up_bias.join().flatten(1)
            hidden_R2F = add_bias(hidden_R2F, bias, torch.ones_like(scores_R), offsets_e)
        y_RD = gemm(weighted_swiglu(hidden_R2F, scores_R, self.activation), *weights.down, offsets_e)
        if weights.down_bias is not None:
            y_RD = add_bias(y_RD, weights.down_bias.join(), scores_R, offsets_e)
        return sum_slots(y_RD, rows_R, slots_SK)

    def __reduce__(self) -> tuple[Any, ...]:
        for name, gemm in GROUPED_GEMM.items():
            if gemm is self.gemm:
                return _composite_of, (name, self.weighs_input, self.activation)
        return CompositeMLP, (self.gemm, self.weighs_input, self.activation)

    def __deepcopy__(self, memo: object) -> "CompositeMLP":
        """A copied layer has the same MLP."""
        return self


def _composite_of(name: str, weighs_input: bool, activation: SwiGLU = PLAIN_SWIGLU) -> CompositeMLP:
    return CompositeMLP(GROUPED_GEMM[name], weighs_input, activation)
