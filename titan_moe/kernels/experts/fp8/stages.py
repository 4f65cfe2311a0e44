"""The stages of the expert MLP in fp8, forward and backward.

S rows · R expert slots, sorted by expert · e experts that the rank computes · D width of a row · F hidden width

    stage    computes                                     from
    up       activation, pre-activation for backward      rows, gate and up
    down     results of slots                             activation, down
    d_down   gradient of pre-activation, of scores        gradients of results, down, pre-activation
    d_up     gradients of slots                           gradient of pre-activation, gate and up
    dw       gradients of weights                         rows and their gradients, both factors of d_down transposed

They are those of kernels/experts/stages.py, with rows, weights, activations and gradients in e4m3. Rows and slots have
a scale each, weights one for each output. Results of GEMMs are bf16 (fp32 in the interpreter).
"""

from typing import NamedTuple

from torch import Tensor

from titan_moe.kernels.experts import stages
from titan_moe.kernels.experts.copy_blocks import TileSchedule
from titan_moe.kernels.experts.fp8.rows import RESULTS, unpack_rows
from titan_moe.kernels.experts.fp8.swiglu import swiglu
from titan_moe.kernels.experts.fp8.swiglu_backward import swiglu_backward
from titan_moe.kernels.experts.fp8.transposed import expert_scales, transposed_rows, transposed_slots
from titan_moe.kernels.experts.fp8.weight_grad import weight_grad
from titan_moe.kernels.experts.fp8.weights import QuantizedWeight
from titan_moe.kernels.experts.gather_mm import gather_mm
from titan_moe.kernels.experts.slot_mm import slot_mm
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import GemmTiles, Tiles
from titan_moe.kernels.experts.weights import Tensors

CUT = GemmTiles(outputs=256, inner=128, num_stages=4)
"""The matrix units' sums of fp8 have about 14 bits; adding them in fp32 every 128 products (arXiv:2412.19437, section
3.3.2) costs 40 % of the rate, and errors are those of the codes, 2 ** -4."""


class QuantizedExperts(NamedTuple):
    """The weights of all experts in fp8."""

    gate_up: QuantizedWeight
    """[e, 2F, D]."""
    down: QuantizedWeight
    """[e, D, F]."""

    def tensors(self) -> list[Tensor]:
        """As operations take them."""
        return [*self.gate_up, *self.down]

    @staticmethod
    def of(tensors: Tensors) -> "QuantizedExperts":
        """The inverse of `tensors`."""
        return QuantizedExperts(QuantizedWeight(*tensors[:4]), QuantizedWeight(*tensors[4:]))


class Activations(NamedTuple):
    """Weighted activations in e4m3."""

    codes_RF: Tensor
    scales_R: Tensor


class HiddenGradients(NamedTuple):
    """What `d_down` leaves for `d_up` and `dw`."""

    codes_R2F: Tensor
    scales_R: Tensor
    dactive_RF: Tensor
    """In bf16, for `plain_dw`; without rows for `dw`."""
    active_RF: Tensor
    """Codes, for `dw`; without rows for `plain_dw`."""
    factors_R2: Tensor
    """By which `dw` multiplies codes."""


def up(
    x: Tensor,
    slots: ExpertSlots,
    weights: QuantizedExperts,
    tiles: Tiles,
    schedule: TileSchedule | None = None,
    kept: Tensor | None = None,
    base: Tensor | None = None,
) -> tuple[Activations, Tensor]:
    """Weighted activation, and the packed pre-activation [R, 2F + 16]. With `schedule`, the launch gets rows into x.

    With `base`, packed rows and the pre-activation, written into `kept`, are those of several layers.
    """
    codes, scales, *_ = weights.gate_up
    hidden_R2F = gather_mm(x, slots.rows_R, codes.mT, tiles, CUT, schedule, scales_eO=scales, base=base, dtype=RESULTS)
    codes_RF, scales_R, kept = swiglu(hidden_R2F, slots.scores_R, slots.offsets_e, kept, base)
    return Activations(codes_RF, scales_R), kept


def down(active: Activations, weights: QuantizedExperts, tiles: Tiles, schedule: TileSchedule | None = None) -> Tensor:
    """Results of slots, [R, D] in bf16."""
    codes, scales, *_ = weights.down
    return slot_mm(
        active.codes_RF, codes.mT, tiles, schedule=schedule, cut=CUT, scales=(active.scales_R, scales), dtype=RESULTS
    )


def d_down(
    dy: Tensor,
    x: Tensor,
    slots: ExpertSlots,
    weights: QuantizedExperts,
    kept: Tensor,
    tiles: Tiles,
    schedule: TileSchedule | None = None,
    base: Tensor | None = None,
    *,
    rounds_weight_gradients: bool = True,
) -> tuple[HiddenGradients, Tensor]:
    """Gradient of the pre-activation, for `dw` or for `plain_dw`, and dscores [R].

    With `schedule`, the launch gets rows into dy.

    With `base`, x and `kept`, but not dy, are those of several layers.
    """
    *_, codes, scales = weights.down
    dactive_RF = gather_mm(dy, slots.rows_R, codes.mT, tiles, CUT, schedule, scales_eO=scales, dtype=RESULTS)
    codes_R2F, scales_R, active_RF, factors_R2, dscores_R = swiglu_backward(
        dactive_RF, kept, slots.scores_R, slots.rows_R, slots.offsets_e, x, dy, base, has_active=rounds_weight_gradients
    )
    if rounds_weight_gradients:
        dactive_RF = dactive_RF.new_empty(0, dactive_RF.shape[1])
    return HiddenGradients(codes_R2F, scales_R, dactive_RF, active_RF, factors_R2), dscores_R


def d_up(
    gradients: HiddenGradients, weights: QuantizedExperts, tiles: Tiles, schedule: TileSchedule | None = None
) -> Tensor:
    """Gradients of slots, [R, D] in bf16."""
    *_, codes, scales = weights.gate_up
    of_both = gradients.scales_R, scales
    return slot_mm(gradients.codes_R2F, codes.mT, tiles, schedule=schedule, cut=CUT, scales=of_both, dtype=RESULTS)


def plain_dw(
    dy: Tensor,
    x: Tensor,
    slots: ExpertSlots,
    gradients: HiddenGradients,
    kept: Tensor,
    base: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`dw` with GEMMs in bf16: of rows and pre-activations as they were rounded, without a second rounding."""
    num_slots = slots.rows_R.numel()
    bases = (None, None) if base is None else (base[:1], base[1:2])
    hidden_R2F = unpack_rows(kept, RESULTS, slots.offsets_e[-1:], base=bases[1], num_rows=num_slots)
    dhidden_R2F, active_RF, _ = stages.swiglu_backward(
        gradients.dactive_RF, hidden_R2F, slots.scores_R, slots.offsets_e
    )
    x_SD = unpack_rows(x, RESULTS, base=bases[0], num_rows=len(dy))
    return stages.dw(unpack_rows(dy, RESULTS), x_SD, slots.rows_R, slots.offsets_e, dhidden_R2F, active_RF)


def dw(
    dy: Tensor,
    x: Tensor,
    slots: ExpertSlots,
    gradients: HiddenGradients,
    tiles: Tiles,
    base: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate_up [e, 2, F, D] and down [e, D, F], in bf16.

    With `base`, x, but not dy, is that of several layers.
    """
    rows_R, _, _, offsets_e = slots
    codes_R2F, _, _, active_RF, factors_R2 = gradients
    scales_e2 = expert_scales(factors_R2, offsets_e)
    dhidden = transposed_slots(codes_R2F, factors_R2, scales_e2, 0, tiles)
    x_columns = transposed_rows(x, rows_R, tiles, base)
    dgate_up = weight_grad(dhidden, x_columns, offsets_e, scales_e2[:, 0], tiles.rows)
    del dhidden, x_columns
    dy_columns = transposed_rows(dy, rows_R, tiles)
    active = transposed_slots(active_RF, factors_R2, scales_e2, 1, tiles)
    ddown_eDF = weight_grad(dy_columns, active, offsets_e, scales_e2[:, 1], tiles.rows)
    return dgate_up.unflatten(1, (2, -1)), ddown_eDF
