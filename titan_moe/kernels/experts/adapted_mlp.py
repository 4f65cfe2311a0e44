"""The expert MLP with low-rank factors beside its weights (LoRA, arXiv:2106.09685), as grouped GEMMs.

R expert slots · e experts · I input width · O output width · r rank · M matrices of a fused weight, gate and up

Physics: 2·R·r·(M·I + M·O) FLOPs beside 2·R·I·M·O of the weight: 3 % of it for a rank of 16 beside widths of 2,048 and
768. GEMMs of a width of 16 are bound by memory: they read rows again and write the result once more. The weights are
frozen, so no gradient of theirs is computed. The reference is that of grouped_mm.py.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from titan_moe.kernels.experts.adapted_fused_mlp import AdaptedFusedMLP
from titan_moe.kernels.experts.composite_mlp import CompositeMLP, ExpertMLP
from titan_moe.kernels.experts.fused_mlp import FusedMLP
from titan_moe.kernels.experts.grouped_mm import GROUPED_GEMM, GroupedGemm
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.stored_mm import stored_mm
from titan_moe.kernels.experts.weights import ExpertWeights


def low_rank_product(
    x_RI: Tensor, a_eMrI: Tensor, b_eMOr: Tensor, offsets_e: Tensor, scale: float, gemm: GroupedGemm
) -> Tensor:
    """Each expert's slots times scale · B A of each of its matrices: -> [R, M·O]."""
    rank, parts = a_eMrI.shape[2], []
    low_RX = gemm(x_RI, a_eMrI.flatten(1, 2), None, offsets_e) * scale
    for low_Rr, b_eOr in zip(low_RX.split(rank, dim=1), b_eMOr.unbind(1), strict=True):
        parts.append(gemm(low_Rr.contiguous(), b_eOr.contiguous(), None, offsets_e))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@dataclass(frozen=True)
class AdaptedMLP:
    """The MLP of frozen weights, in compute's dtype or as codes with `scales`, perhaps with factors: A and B of gate
    and up, [e, 2, r, I] and [e, 2, O, r], then those of down, [e, r, I] and [e, O, r]."""

    mlp: CompositeMLP
    kind: str
    """Of the GEMMs of factors and codes (grouped_mm.py); rounded weights may have another one."""
    scale: float = 1.0

    def __call__(self, x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights) -> Tensor:
        """-> y_SD."""
        pairs = iter(_pairs(weights.factors))
        stored = zip((weights.gate_up.own, weights.down.own), weights.scales, strict=False)

        def gemm(x_RI: Tensor, own_eOI: Tensor, clones_cOI: Tensor | None, offsets_e: Tensor) -> Tensor:
            if weights.scales:
                y_RO = stored_mm(x_RI, *next(stored), offsets_e, self.kind)
            else:
                y_RO = self.mlp.gemm(x_RI, own_eOI, clones_cOI, offsets_e)
            if not weights.factors:
                return y_RO
            return y_RO + low_rank_product(x_RI, *next(pairs), offsets_e, self.scale, GROUPED_GEMM[self.kind])

        return self.mlp(x_SD, slots, weights, gemm)

    def __deepcopy__(self, memo: object) -> "AdaptedMLP":
        """A copied layer has the same MLP."""
        return self


def _pairs(factors: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    if not factors:
        return []
    a_up, b_up, a_down, b_down = factors
    return [(a_up, b_up), (a_down[:, None], b_down[:, None])]


def adapted_mlp(mlp: ExpertMLP, scale: float = 1.0) -> "AdaptedMLP | AdaptedFusedMLP":
    """The MLP of frozen weights; of one that is that already, with this scale of factors.

    Raises: TypeError for an MLP that neither consists of GEMMs nor is fused in compute's dtype.
    """
    if isinstance(mlp, AdaptedMLP | AdaptedFusedMLP):
        return replace(mlp, scale=scale)
    if isinstance(mlp, FusedMLP) and not mlp.format.is_rounded and not mlp.format.has_bias:
        return AdaptedFusedMLP(mlp.format, scale)
    if not isinstance(mlp, CompositeMLP):
        raise TypeError(f"frozen experts need an MLP of grouped GEMMs, or a fused one without biases, not {mlp}")
    return AdaptedMLP(mlp, "reference" if mlp.gemm is GROUPED_GEMM["reference"] else "grouped_mm", scale)
