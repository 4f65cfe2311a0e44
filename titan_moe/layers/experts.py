"""The routed experts of this rank, as two grouped GEMMs.

S rows · R expert slots · e experts on this rank · L width of a row · F hidden width of an expert
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan_moe.dispatch.base import Routed
from titan_moe.kernels.grouped_mm import grouped_mm
from titan_moe.kernels.permute import gather_rows, sum_slots
from titan_moe.kernels.swiglu import weighted_swiglu

GroupedGEMM = Callable[[Tensor, Tensor, Tensor], Tensor]


class GroupedExperts(nn.Module):
    """SwiGLU experts that read rows by index, weigh them by their routing score and sum a row's slots.

    Gate and up are stored together as `[e, 2, F, L]`, down as `[e, L, F]`: one GEMM reads gate and up at once, and
    dimension 2 of both is the hidden width. `local` turns a stored weight into the plain tensor of this rank's
    experts; it is identity unless the experts are spread over ranks.
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        ffn_hidden_size: int,
        *,
        gemm: GroupedGEMM = grouped_mm,
        score_on: str = "activation",
    ) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2, ffn_hidden_size, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, ffn_hidden_size))
        self.gemm = gemm
        self.scores_weigh_input = score_on == "input"
        self.local: Callable[[Tensor], Tensor] = _identity

    def forward(self, routed: Routed) -> Tensor:
        """Serve the rows: -> [S, L], zero for a row that no expert here wants."""
        x_RL = gather_rows(routed.x_SD, routed.rows_R, routed.slots_SK)
        scores_R = routed.scores_R
        if self.scores_weigh_input:
            x_RL, scores_R = (x_RL * scores_R[:, None]).to(x_RL.dtype), torch.ones_like(scores_R)
        hidden_R2F = self.gemm(x_RL, self.local(self.gate_up).flatten(1, 2), routed.offsets_e)
        active_RF = weighted_swiglu(hidden_R2F, scores_R)
        y_RL = self.gemm(active_RF, self.local(self.down), routed.offsets_e)
        return sum_slots(y_RL, routed.rows_R, routed.slots_SK)


def _identity(weight: Tensor) -> Tensor:
    return weight
