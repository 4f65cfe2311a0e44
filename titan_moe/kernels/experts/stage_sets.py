"""The stages of the expert MLP with the weights that they read: in the dtype of compute, or in fp8.

T tokens on this rank · S rows · R expert slots · D width of a row · F hidden width

The caller (dispatch/symm_mem_mlp.py) sends and keeps rows and pre-activations. It does not read them.
"""

from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from titan_moe.kernels.experts import stages
from titan_moe.kernels.experts.copy_blocks import TileSchedule
from titan_moe.kernels.experts.fp8 import stages as fp8_stages
from titan_moe.kernels.experts.fp8.mlp import NUM_PARAMETERS, codes_of
from titan_moe.kernels.experts.fp8.packed import BLOCK, CODES, WHOLE_ROW, packed_width
from titan_moe.kernels.experts.fp8.rows import RESULTS, quantize_rows
from titan_moe.kernels.experts.fp8.stages import Activations, HiddenGradients, QuantizedExperts
from titan_moe.kernels.experts.slot_mm import slot_mm
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import Tiles
from titan_moe.kernels.experts.weights import ExpertWeights, Tensors

PLAIN, FP8, FP8_WITH_PLAIN_WEIGHT_GRADIENTS, BLOCKWISE, BLOCKWISE_WITH_PLAIN_WEIGHT_GRADIENTS = range(5)
"""The formats of stages, as operations take them."""
ROUNDS_WEIGHT_GRADIENTS = FP8, BLOCKWISE
"""Those whose weight gradients are in fp8 too."""


def _columns(stage_format: int) -> int:
    """Columns of a scale, in fp8."""
    return BLOCK if stage_format in (BLOCKWISE, BLOCKWISE_WITH_PLAIN_WEIGHT_GRADIENTS) else WHOLE_ROW


class Work(NamedTuple):
    """The slots of a layer, and the order in which GEMMs compute them."""

    slots: ExpertSlots
    tiles: Tiles
    schedule: TileSchedule | None = None
    """With it, a GEMM gets its rows or puts its sums."""


class Stages(Protocol):
    """The stages, with weights. Rows are as `pack` makes them; `base` is as in kernels/experts/stages.py."""

    def pack(self, x_TD: Tensor) -> Tensor:
        """Rows as they are sent and kept, in the same dtype: [T, D] -> [T, W]."""

    def up(self, x_SW: Tensor, work: Work, hidden: Tensor, base: Tensor | None) -> Any:
        """The activation; the pre-activation is written into `hidden`."""

    def down(self, active: Any, work: Work, *, in_triton: bool) -> Tensor:
        """Results of slots, [R, D]; with a schedule or `in_triton` by a GEMM of Triton."""

    def d_down(
        self,
        dy_SW: Tensor,
        x_SW: Tensor,
        work: Work,
        hidden: Tensor,
        base: Tensor | None,
        dactive: Tensor | None = None,
        delayed: Tensor | None = None,
    ) -> tuple[Any, Tensor]:
        """What `d_up` and `dw` need, and gradients of scores. Gradients of activations are written into `dactive`, if
        it is given, for `delayed_dw`; with `delayed`, they and dy_SW are those of several layers."""

    def d_up(self, gradients: Any, work: Work, *, in_triton: bool) -> Tensor:
        """Gradients of slots, [R, D]."""

    def dw(
        self, dy_SW: Tensor, x_SW: Tensor, work: Work, gradients: Any, hidden: Tensor, base: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gradients of gate_up and down, in one piece each."""


def stages_of(weights: Tensors, stage_format: int) -> Stages:
    """The stages for weights as operations take them: own ones and clones, or what `operands` of fp8/mlp.py returns."""
    if stage_format == PLAIN:
        return PlainStages(ExpertWeights.of(weights).join())
    return Fp8Stages(weights, _columns(stage_format), stage_format in ROUNDS_WEIGHT_GRADIENTS)


def delayed_dw(
    dy_SW: Tensor,
    x_SW: Tensor,
    slots: ExpertSlots,
    tiles: Tiles | None,
    dactive: Tensor,
    hidden: Tensor,
    base: Tensor | None,
    delayed: Tensor | None,
    stage_format: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate_up and down, in one piece each, from what `d_down` wrote into `dactive` and what it read.

    `tiles` are those of `d_down`, for a format of `ROUNDS_WEIGHT_GRADIENTS`.
    """
    if stage_format == PLAIN:
        return stages.delayed_dw(dy_SW, x_SW, slots, dactive, hidden, base, delayed)
    rounds, columns = stage_format in ROUNDS_WEIGHT_GRADIENTS, _columns(stage_format)
    of_rows = dy_SW.view(CODES), x_SW.view(CODES), slots, dactive, hidden
    return fp8_stages.delayed_dw(*of_rows, tiles, base, delayed, rounds_weight_gradients=rounds, columns=columns)


def split_gradients(weights: Tensors, joined: Tensors, stage_format: int) -> list[Tensor | None]:
    """Gradients of joined parameters -> those of weights as operations take them; codes have none."""
    if stage_format != PLAIN:
        return [*joined, *(None,) * (len(weights) - NUM_PARAMETERS)]
    return list(ExpertWeights.of(weights).split(joined))


def row_width(width: int, element_bytes: int, stage_format: int) -> int:
    """The elements of a row of `width` as it is sent and kept (W)."""
    return width if stage_format == PLAIN else packed_width(width, _columns(stage_format)) // element_bytes


def new_dactive(like: Tensor, num_slots: int, hidden: int, stage_format: int) -> Tensor:
    """Memory for gradients of so many activations; `hidden` is F."""
    return like.new_empty(num_slots, hidden, dtype=None if stage_format == PLAIN else RESULTS)


def new_hidden(like: Tensor, num_slots: int, hidden: int, stage_format: int) -> Tensor:
    """Memory for so many pre-activations as they are kept; `hidden` is F."""
    if stage_format == PLAIN:
        return like.new_empty(num_slots, 2 * hidden)
    return like.new_empty(num_slots, packed_width(2 * hidden, _columns(stage_format)), dtype=CODES)


class PlainStages(NamedTuple):
    """In the dtype of compute."""

    weights: ExpertWeights
    """Joined."""

    def pack(self, x_TD: Tensor) -> Tensor:
        return x_TD

    def up(self, x_SW: Tensor, work: Work, hidden: Tensor, base: Tensor | None) -> Tensor:
        return stages.up(x_SW, work.slots, self.weights, work.tiles, work.schedule, hidden, base)[1]

    def down(self, active: Tensor, work: Work, *, in_triton: bool) -> Tensor:
        return stages.down(active, work.slots, self.weights, _gemm(work, in_triton))

    def d_down(
        self,
        dy_SW: Tensor,
        x_SW: Tensor,
        work: Work,
        hidden: Tensor,
        base: Tensor | None,
        dactive: Tensor | None = None,
        delayed: Tensor | None = None,
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        dhidden_R2F, active_RF, dscores_R = stages.d_down(
            dy_SW, work.slots, self.weights, hidden, work.tiles, work.schedule, base, dactive, delayed
        )
        return (dhidden_R2F, active_RF), dscores_R

    def d_up(self, gradients: tuple[Tensor, Tensor], work: Work, *, in_triton: bool) -> Tensor:
        return stages.d_up(gradients[0], work.slots, self.weights, _gemm(work, in_triton))

    def dw(
        self,
        dy_SW: Tensor,
        x_SW: Tensor,
        work: Work,
        gradients: tuple[Tensor, Tensor],
        hidden: Tensor,
        base: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return stages.dw(dy_SW, x_SW, work.slots.rows_R, work.slots.offsets_e, *gradients, base)


def _gemm(work: Work, in_triton: bool) -> stages.SlotGemm:
    if work.schedule is None and not in_triton:
        return F.grouped_mm
    return lambda x_RI, weight_eIO, offs: slot_mm(x_RI, weight_eIO, work.tiles, schedule=work.schedule)


class Fp8Stages:
    """In e4m3: rows are sent and kept as codes with their scales behind them. All GEMMs are Triton's."""

    def __init__(self, weights: Tensors, columns: int, rounds_weight_gradients: bool) -> None:
        self.weights, self.columns, self.rounds_weight_gradients = weights, columns, rounds_weight_gradients

    @cached_property
    def forward(self) -> QuantizedExperts:
        """Backward needs these too where it computes pre-activations again."""
        return QuantizedExperts.of(codes_of(self.weights, self.columns))

    @cached_property
    def backward(self) -> QuantizedExperts:
        """Transposed."""
        return QuantizedExperts.of(codes_of(self.weights, self.columns, for_backward=True))

    def pack(self, x_TD: Tensor) -> Tensor:
        return quantize_rows(x_TD, self.columns).view(x_TD.dtype)

    def up(self, x_SW: Tensor, work: Work, hidden: Tensor, base: Tensor | None) -> Activations:
        return fp8_stages.up(x_SW.view(CODES), work.slots, self.forward, work.tiles, work.schedule, hidden, base)[0]

    def down(self, active: Activations, work: Work, *, in_triton: bool) -> Tensor:
        return fp8_stages.down(active, self.forward, work.tiles, work.schedule)

    def d_down(
        self,
        dy_SW: Tensor,
        x_SW: Tensor,
        work: Work,
        hidden: Tensor,
        base: Tensor | None,
        dactive: Tensor | None = None,
        delayed: Tensor | None = None,
    ) -> tuple[HiddenGradients, Tensor]:
        rows, of_work = (dy_SW.view(CODES), x_SW.view(CODES)), (work.tiles, work.schedule)
        places, rounds = (base, dactive, delayed), self.rounds_weight_gradients
        return fp8_stages.d_down(
            *rows, work.slots, self.backward, hidden, *of_work, *places, rounds_weight_gradients=rounds
        )

    def d_up(self, gradients: HiddenGradients, work: Work, *, in_triton: bool) -> Tensor:
        return fp8_stages.d_up(gradients, self.backward, work.tiles, work.schedule)

    def dw(
        self, dy_SW: Tensor, x_SW: Tensor, work: Work, gradients: HiddenGradients, hidden: Tensor, base: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        dy, x = dy_SW.view(CODES), x_SW.view(CODES)
        if not self.rounds_weight_gradients:
            return fp8_stages.plain_dw(dy, x, work.slots, gradients, hidden, base)
        return fp8_stages.dw(dy, x, work.slots, gradients, work.tiles, base)
