"""The passes of the expert MLP in fp8, forward and backward.

S rows · R expert slots, sorted by expert · e experts that the rank computes · D width of a row · F hidden width

    pass     computes                                     from
    up       activation, pre-activation for backward      rows, gate and up
    down     results of slots                             activation, down
    d_down   gradient of pre-activation, of scores        gradients of results, down, pre-activation
    d_up     gradients of slots                           gradient of pre-activation, gate and up
    dw       gradients of weights                         rows and their gradients, both factors of d_down transposed

They are those of kernels/experts/passes.py, with rows, weights, activations and gradients in e4m3. Rows and slots have
a scale each, weights one for each output; or blocks have, 128 columns of rows and slots and 128 x 128 of weights, as
the quantised weights say; on Hopper these have GEMMs of their own (block_mm.py, block_weight_grad.py) where no copy
blocks run beside them. Results of GEMMs are bf16 (fp32 in the interpreter).
"""

from typing import Any, NamedTuple

from torch import Tensor

from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.experts import passes
from titan_moe.kernels.experts.copy_blocks import TileSchedule
from titan_moe.kernels.experts.fp8.block_mm import block_mm, has_roles
from titan_moe.kernels.experts.fp8.block_weight_grad import block_weight_grad
from titan_moe.kernels.experts.fp8.packed import BLOCK, WHOLE_ROW
from titan_moe.kernels.experts.fp8.requantized import requantized_rows, requantized_slots
from titan_moe.kernels.experts.fp8.rows import RESULTS, unpack_rows
from titan_moe.kernels.experts.fp8.swiglu import swiglu
from titan_moe.kernels.experts.fp8.swiglu_backward import swiglu_backward
from titan_moe.kernels.experts.fp8.transposed import expert_scales, transposed_rows, transposed_slots
from titan_moe.kernels.experts.fp8.weight_grad import weight_grad
from titan_moe.kernels.experts.fp8.weights import WeightCodes
from titan_moe.kernels.experts.gather_mm import gather_mm
from titan_moe.kernels.experts.slot_mm import slot_mm
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import GemmTiles, Tiles
from titan_moe.kernels.experts.weights import Tensors

CUT = GemmTiles(outputs=256, inner=128, num_stages=4)
"""The matrix units' sums of fp8 have about 14 bits; adding them in fp32 every 128 products (arXiv:2412.19437, section
3.3.2) costs much of the rate (tools/results), and errors are those of the codes, 2 ** -4."""
BLOCK_CUT = GemmTiles(outputs=2 * BLOCK, inner=BLOCK, num_stages=4)
"""With scales of blocks they are added every 128 products in any case. Registers hold the sums of both blocks of
outputs, and the products of one."""


class QuantizedExperts(NamedTuple):
    """The weights of all experts in fp8, as stored for `up` and `down`, transposed for `d_down` and `d_up`."""

    gate_up: WeightCodes
    """Of [e, 2F, D]."""
    down: WeightCodes
    """Of [e, D, F]."""

    @property
    def columns(self) -> int:
        """Those of a block that has a scale; 0 for one scale a row, slot or output."""
        return self.gate_up.columns

    def tensors(self) -> list[Tensor]:
        """As operations take them."""
        return [*self.gate_up, *self.down]

    @staticmethod
    def of(tensors: Tensors) -> "QuantizedExperts":
        """The inverse of `tensors`."""
        return QuantizedExperts(WeightCodes(*tensors[:2]), WeightCodes(*tensors[2:]))


class Activations(NamedTuple):
    """Weighted activations in e4m3."""

    codes_RF: Tensor
    scales: Tensor
    """[R], with blocks [R, F / 128]."""


class HiddenGradients(NamedTuple):
    """What `d_down` leaves for `d_up` and `dw`."""

    codes_R2F: Tensor
    scales: Tensor
    """[R], with blocks [R, 2F / 128]."""
    dactive_RF: Tensor
    """In bf16, for `plain_dw`; without rows for `dw`."""
    active_RF: Tensor
    """Codes, for `dw`; without rows for `plain_dw`."""
    factors: Tensor
    """By which `dw` multiplies codes, those of swiglu_backward.py."""

    @property
    def columns(self) -> int:
        """As in `QuantizedExperts`."""
        return BLOCK if self.scales.ndim == 2 else WHOLE_ROW


def up(
    x: Tensor,
    slots: ExpertSlots,
    weights: QuantizedExperts,
    tiles: Tiles,
    schedule: TileSchedule | None = None,
    kept: Tensor | None = None,
    base: Tensor | None = None,
    activation: SwiGLU = PLAIN_SWIGLU,
) -> tuple[Activations, Tensor]:
    """Weighted activation, and the packed pre-activation of slots. With `schedule`, the launch gets rows into x.

    With `base`, packed rows and the pre-activation, written into `kept`, are those of several layers.
    """
    hidden_R2F = _gather_mm(x, slots, weights.gate_up, tiles, schedule, base)
    options: Any = {"columns": weights.columns, "activation": activation}
    codes_RF, scales, kept = swiglu(hidden_R2F, slots.scores_R, slots.offsets_e, kept, base, **options)
    return Activations(codes_RF, scales), kept


def down(active: Activations, weights: QuantizedExperts, tiles: Tiles, schedule: TileSchedule | None = None) -> Tensor:
    """Results of slots, [R, D] in bf16."""
    return times_weight(active, weights.down, tiles, schedule)


def d_down(
    dy: Tensor,
    x: Tensor,
    slots: ExpertSlots,
    weights: QuantizedExperts,
    kept: Tensor,
    tiles: Tiles,
    schedule: TileSchedule | None = None,
    base: Tensor | None = None,
    dactive_RF: Tensor | None = None,
    delayed: Tensor | None = None,
    *,
    rounds_weight_gradients: bool = True,
    activation: SwiGLU = PLAIN_SWIGLU,
) -> tuple[HiddenGradients, Tensor]:
    """Gradient of the pre-activation, for `dw` or for `plain_dw`, and dscores [R].

    With `schedule`, the launch gets rows into dy.

    Gradients of activations are written into `dactive_RF`, if it is given, for `delayed_dw`. With `base`, x and `kept`
    are those of several layers. With `delayed`, dy and dactive_RF are.
    """
    dactive_RF = _gather_mm(dy, slots, weights.down, tiles, schedule, delayed, dactive_RF, delayed)
    options = rounds_weight_gradients, weights.columns, activation
    return _d_hidden(dy, x, slots, dactive_RF, kept, base, delayed, *options)


def _d_hidden(
    dy: Tensor,
    x: Tensor,
    slots: ExpertSlots,
    dactive_RF: Tensor,
    kept: Tensor,
    base: Tensor | None,
    delayed: Tensor | None,
    rounds_weight_gradients: bool,
    columns: int,
    activation: SwiGLU,
) -> tuple[HiddenGradients, Tensor]:
    codes_R2F, scales, active_RF, factors, dscores_R = swiglu_backward(
        dactive_RF, kept, slots.scores_R, slots.rows_R, slots.offsets_e, x, dy, base, delayed,
        has_active=rounds_weight_gradients, columns=columns, activation=activation,
    )  # fmt: skip
    if rounds_weight_gradients:
        dactive_RF = dactive_RF.new_empty(0, dactive_RF.shape[1])
    return HiddenGradients(codes_R2F, scales, dactive_RF, active_RF, factors), dscores_R


def d_up(
    gradients: HiddenGradients, weights: QuantizedExperts, tiles: Tiles, schedule: TileSchedule | None = None
) -> Tensor:
    """Gradients of slots, [R, D] in bf16."""
    return times_weight(gradients[:2], weights.gate_up, tiles, schedule)


def _gather_mm(
    rows: Tensor,
    slots: ExpertSlots,
    weight: Tensors,
    tiles: Tiles,
    schedule: TileSchedule | None,
    base: Tensor | None = None,
    out: Tensor | None = None,
    out_base: Tensor | None = None,
) -> Tensor:
    """Packed rows times a weight, codes and scales."""
    codes, scales = weight
    cut, columns = _cut_of(scales)
    if columns and schedule is None and has_roles(rows.device):
        places = {"base": base, "out": out, "out_base": out_base}
        return block_mm(rows, codes, scales, tiles, RESULTS, rows_R=slots.rows_R, **places)
    return gather_mm(
        rows, slots.rows_R, codes.mT, tiles, cut, schedule,
        scales=scales, columns=columns, base=base, dtype=RESULTS, out=out, out_base=out_base,
    )  # fmt: skip


def times_weight(of_slots: Tensors, weight: Tensors, tiles: Tiles, schedule: TileSchedule | None = None) -> Tensor:
    """Slots times a weight, both codes and scales: -> [R, O] in bf16."""
    codes, scales = weight
    cut, columns = _cut_of(scales)
    if columns and schedule is None and has_roles(codes.device):
        return block_mm(of_slots[0], codes, scales, tiles, RESULTS, row_scales_Ri=of_slots[1])
    both = of_slots[1], scales
    return slot_mm(
        of_slots[0], codes.mT, tiles, schedule=schedule, cut=cut, scales=both, columns=columns, dtype=RESULTS
    )


def _cut_of(weight_scales: Tensor) -> tuple[GemmTiles, int]:
    return (BLOCK_CUT, BLOCK) if weight_scales.ndim == 3 else (CUT, WHOLE_ROW)


def plain_dw(
    dy: Tensor,
    x: Tensor,
    slots: ExpertSlots,
    gradients: HiddenGradients,
    kept: Tensor,
    base: Tensor | None = None,
    activation: SwiGLU = PLAIN_SWIGLU,
) -> tuple[Tensor, Tensor]:
    """`dw` with GEMMs in bf16: of rows and pre-activations as they were rounded, without a second rounding."""
    return _plain_dw(dy, x, slots, gradients.dactive_RF, kept, base, None, gradients.columns, activation)


def _plain_dw(
    dy: Tensor,
    x: Tensor,
    slots: ExpertSlots,
    dactive_RF: Tensor,
    kept: Tensor,
    base: Tensor | None,
    delayed: Tensor | None,
    columns: int,
    activation: SwiGLU,
) -> tuple[Tensor, Tensor]:
    num_rows, num_slots = len(slots.slots_SK), slots.rows_R.numel()
    bases = (None, None) if base is None else (base[:1], base[1:2])
    hidden_R2F = unpack_rows(kept, RESULTS, slots.offsets_e[-1:], columns=columns, base=bases[1], num_rows=num_slots)
    dhidden_R2F, active_RF, _ = passes.swiglu_backward(
        dactive_RF, hidden_R2F, slots.scores_R, slots.offsets_e, dactive_base=delayed, activation=activation
    )
    x_SD = unpack_rows(x, RESULTS, columns=columns, base=bases[0], num_rows=num_rows)
    of_dy = None if delayed is None else delayed[:1]
    dy_SD = unpack_rows(dy, RESULTS, columns=columns, base=of_dy, num_rows=num_rows)
    dgate_up, ddown_eDF = passes.dw(dy_SD, x_SD, slots, dhidden_R2F, active_RF)
    return dgate_up, ddown_eDF


def dw(
    dy: Tensor,
    x: Tensor,
    slots: ExpertSlots,
    gradients: HiddenGradients,
    tiles: Tiles,
    base: Tensor | None = None,
    delayed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate_up [e, 2, F, D] and down [e, D, F], in bf16.

    With `base`, x is that of several layers; with `delayed`, dy is.
    """
    rows_R, _, _, offsets_e = slots
    codes_R2F, _, _, active_RF, factors = gradients
    if gradients.columns:
        return _dw_of_blocks(dy, x, slots, gradients, tiles, base, delayed)
    scales_e2 = expert_scales(factors, offsets_e)
    dhidden = transposed_slots(codes_R2F, factors, scales_e2, 0, tiles)
    x_columns = transposed_rows(x, rows_R, tiles, base)
    dgate_up = weight_grad(dhidden, x_columns, offsets_e, scales_e2[:, 0], tiles.rows)
    del dhidden, x_columns
    dy_columns = transposed_rows(dy, rows_R, tiles, delayed)
    active = transposed_slots(active_RF, factors, scales_e2, 1, tiles)
    ddown_eDF = weight_grad(dy_columns, active, offsets_e, scales_e2[:, 1], tiles.rows)
    return dgate_up.unflatten(1, (2, -1)), ddown_eDF


def _dw_of_blocks(
    dy: Tensor,
    x: Tensor,
    slots: ExpertSlots,
    gradients: HiddenGradients,
    tiles: Tiles,
    base: Tensor | None,
    delayed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    codes_R2F, scales, _, active_RF, active_scales = gradients
    # factors are freed after each product
    dgate_up = sum_over_slots(
        requantized_slots(codes_R2F, scales, tiles), requantized_rows(x, slots.rows_R, tiles, base), slots.offsets_e
    )
    ddown_eDF = sum_over_slots(
        requantized_rows(dy, slots.rows_R, tiles, delayed),
        requantized_slots(active_RF, active_scales, tiles),
        slots.offsets_e,
    )
    return dgate_up.unflatten(1, (2, -1)), ddown_eDF


def delayed_dw(
    dy: Tensor,
    x: Tensor,
    slots: ExpertSlots,
    dactive_RF: Tensor,
    kept: Tensor,
    tiles: Tiles | None,
    base: Tensor | None = None,
    delayed: Tensor | None = None,
    *,
    rounds_weight_gradients: bool,
    columns: int,
    activation: SwiGLU = PLAIN_SWIGLU,
) -> tuple[Tensor, Tensor]:
    """`dw`, which needs the tiles of `d_down`, or `plain_dw` a while after it: gradients of pre-activations and
    activations are computed again.

    With `base`, x and `kept` are those of several layers; with `delayed`, dy and dactive_RF are.
    """
    places = base, delayed
    if not rounds_weight_gradients:
        return _plain_dw(dy, x, slots, dactive_RF, kept, *places, columns, activation)
    assert tiles is not None, "gradients are rounded by tile"
    gradients, _ = _d_hidden(dy, x, slots, dactive_RF, kept, *places, rounds_weight_gradients, columns, activation)
    return dw(dy, x, slots, gradients, tiles, *places)


def sum_over_slots(a: Tensors, b: Tensors, offsets_e: Tensor) -> Tensor:
    """The gradient of a weight, [e, A, B] in bf16, from factors of requantized.py, codes and scales each."""
    (codes_a, scales_MA), (codes_b, scales_MB) = a, b
    if has_roles(codes_a.device):
        return block_weight_grad(codes_a, codes_b, offsets_e, scales_MA, scales_MB)
    return weight_grad(codes_a, codes_b, offsets_e, scales_MA, BLOCK, b_scales=scales_MB)
