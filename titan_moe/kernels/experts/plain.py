"""Routed experts in the dtype of compute: bf16 on a GPU, fp32 in the interpreter."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.config.formats import GemmFormats
from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.experts import passes
from titan_moe.kernels.experts.format import Direction, ExpertFormat, Work
from titan_moe.kernels.experts.slot_mm import slot_mm
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import MATRICES, ExpertWeights, Tensors


@dataclass(frozen=True)
class PlainPasses:
    """Those of passes.py. A pass joins clones to own weights for itself, where they are not joined yet."""

    weights: ExpertWeights
    activation: SwiGLU = PLAIN_SWIGLU

    def up(self, x_SW: Tensor, work: Work, hidden: Tensor, base: Tensor | None = None) -> Tensor:
        of_work = work.slots, self.weights, work.tiles, work.schedule
        return passes.up(x_SW, *of_work, hidden, base, self.activation)[1]

    def down(self, active: Tensor, work: Work, *, in_triton: bool = False) -> Tensor:
        return passes.down(active, work.slots, self.weights, _gemm(work, in_triton))

    def d_down(
        self,
        dy_SW: Tensor,
        x_SW: Tensor,
        work: Work,
        hidden: Tensor,
        base: Tensor | None = None,
        dactive: Tensor | None = None,
        delayed: Tensor | None = None,
    ) -> tuple[Tensors, Tensor]:
        *gradients, dscores_R = passes.d_down(
            dy_SW, work.slots, self.weights, hidden, work.tiles, work.schedule, base, dactive, delayed, self.activation
        )
        return gradients, dscores_R

    def d_up(self, gradients: Tensors, work: Work, *, in_triton: bool = False) -> Tensor:
        return passes.d_up(gradients[0], work.slots, self.weights, _gemm(work, in_triton))


def _gemm(work: Work, in_triton: bool) -> passes.SlotGemm:
    if work.schedule is None and not in_triton:
        return F.grouped_mm
    return lambda x_RI, weight_eIO, offs: slot_mm(x_RI, weight_eIO, work.tiles, schedule=work.schedule)


@dataclass(frozen=True)
class PlainFormat(ExpertFormat):
    """Nothing is rounded."""

    def row_width(self, width: int, dtype: torch.dtype) -> int:
        return width

    def pack(self, x_TD: Tensor) -> Tensor:
        return x_TD

    def unpack(self, x_SW: Tensor, count: Tensor | None = None) -> Tensor:
        return x_SW

    def new_hidden(self, like: Tensor, num_slots: int, hidden: int) -> Tensor:
        return like.new_empty(num_slots, 2 * hidden)

    def new_gradients(self, like: Tensor, num_slots: int, hidden: int) -> list[Tensor]:
        return [like.new_empty(num_slots, 2 * hidden), like.new_empty(num_slots, hidden)]

    def operands(self, weights: ExpertWeights) -> list[Tensor]:
        if weights.names() != MATRICES:
            raise ValueError(
                f'fused experts have no parameters but {MATRICES}, not {weights.names()}; take "grouped_mm"'
            )
        own, clones = weights.tensors()[:2], weights.tensors()[2:]  # which are joined anyway
        return [*(weight.contiguous() for weight in own), *clones]

    def split(self, weights: Tensors, joined: Tensors) -> list[Tensor | None]:
        return list(ExpertWeights.of(weights).split(joined))

    def passes(self, weights: Tensors, direction: Direction | None = None) -> PlainPasses:
        of_all = ExpertWeights.of(weights)
        return PlainPasses(of_all if direction else of_all.join(), self.activation)

    def dw(
        self, dy_SW: Tensor, x_SW: Tensor, slots: ExpertSlots, tiles: Any, gradients: Tensors, hidden: Any,
        base: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dhidden_R2F, active_RF = gradients
        return passes.dw(dy_SW, x_SW, slots.rows_R, slots.offsets_e, dhidden_R2F, active_RF, base)

    def delayed_dw(
        self, dy_SW: Tensor, x_SW: Tensor, slots: ExpertSlots, tiles: Any, dactive: Tensor, hidden: Tensor,
        base: Tensor | None, delayed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return passes.delayed_dw(dy_SW, x_SW, slots, dactive, hidden, base, delayed, self.activation)


PLAIN = PlainFormat(GemmFormats())
