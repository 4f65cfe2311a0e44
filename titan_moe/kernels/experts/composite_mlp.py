"""The expert MLP on rows: gather, gate and up, SwiGLU, score, down, sum of a row's slots.

S rows · R expert slots, sorted by expert · K choices a row · e local experts · D width of a row · F hidden width

Three candidates. The composites are gather, grouped GEMM, SwiGLU, grouped GEMM and sum, which a compiler fuses between
the GEMMs; `fused` (fused_expert_mlp.py) is Triton around the same GEMMs and keeps less for backward.

Weights may come in two pieces, a rank's own experts and clones of others behind them (c of e + c): grouped_mm.py says
why they are joined no earlier than a GEMM reads them.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from titan_moe.kernels.experts.grouped_mm import grouped_mm, grouped_mm_loop
from titan_moe.kernels.experts.swiglu import weighted_swiglu
from titan_moe.kernels.permute.rows import gather_rows, sum_slots

ExpertMLP = Callable[..., Tensor]
"""x_SD, rows_R, slots_SK, scores_R, offsets_e, gate_up_e2FD, down_eDF[, gate_up_c2FD, down_cDF] -> y_SD, zero for a row
that no expert wants."""


@cache
def choose_expert_mlp(choice: str, score_on: str) -> ExpertMLP:
    """The MLP for the recipe's choice of expert kernels and `model.moe.score_on`.

    Raises: ValueError for `fused` with scores on the input, which it gathers where no score can reach it.
    """
    if choice != "fused":
        gemm = {"grouped_mm": grouped_mm, "reference": grouped_mm_loop}[choice]
        return composite(gemm, weighs_input=score_on == "input")
    if score_on == "input":
        raise ValueError('perf.kernels = "fused" needs model.moe.score_on = "activation"; or take "grouped_mm"')
    from titan_moe.kernels.experts.fused_mlp import fused_expert_mlp

    return fused_expert_mlp


def composite(gemm: Callable[..., Tensor], *, weighs_input: bool = False) -> ExpertMLP:
    """The MLP as gather, GEMM, SwiGLU, GEMM, sum; the score weighs the activation, or the gathered rows (Llama 4)."""

    def expert_mlp(
        x_SD: Tensor,
        rows_R: Tensor,
        slots_SK: Tensor,
        scores_R: Tensor,
        offsets_e: Tensor,
        gate_up_e2FD: Tensor,
        down_eDF: Tensor,
        gate_up_c2FD: Tensor | None = None,
        down_cDF: Tensor | None = None,
    ) -> Tensor:
        x_RD = gather_rows(x_SD, rows_R, slots_SK)
        if weighs_input:
            x_RD, scores_R = (x_RD * scores_R[:, None]).to(x_RD.dtype), torch.ones_like(scores_R)
        clones_cOD = None if gate_up_c2FD is None else gate_up_c2FD.flatten(1, 2)
        hidden_R2F = gemm(x_RD, gate_up_e2FD.flatten(1, 2), offsets_e, clones_cOD)
        y_RD = gemm(weighted_swiglu(hidden_R2F, scores_R), down_eDF, offsets_e, down_cDF)
        return sum_slots(y_RD, rows_R, slots_SK)

    return expert_mlp
