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
from titan_moe.kernels.experts.weights import ExpertParameter, ExpertWeights, Tensors


@dataclass(frozen=True)
class PlainPasses:
    """Those of passes.py. A pass joins clones to own weights for itself, where they are not joined yet."""

    weights: ExpertWeights
    activation: SwiGLU = PLAIN_SWIGLU

    def up(self, x_SW: Tensor, work: Work, hidden: Tensor, base: Tensor | None = None) -> Tensor:
        of_work = work.slots, self.weights, work.tiles, work.schedule
        return passes.up(x_SW, *of_work, hidden, base, self.activation)[1]

    def down(self, active: Tensor, work: Work, *, in_triton: bool = False) -> Tensor:
        return passes.down(active, work.slots, self.weights, _gemm(work, in_triton, self.weights.down_bias))

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


def _gemm(work: Work, in_triton: bool, bias: ExpertParameter | None = None) -> passes.SlotGemm:
    if work.schedule is None and not in_triton and bias is None:
        return F.grouped_mm
    weighted = None if bias is None else (work.slots.scores_R, bias.join())
    return lambda x_RI, weight_eIO, offs: slot_mm(x_RI, weight_eIO, work.tiles, schedule=work.schedule, bias=weighted)


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
        if weights.names() != self.parameters:
            raise ValueError(
                f'these fused experts have the parameters {self.parameters}, not {weights.names()}; take "grouped_mm", '
                f"or has_bias = {not self.has_bias} in choose_expert_mlp"
            )
        number = len(self.parameters)
        own, clones = weights.tensors()[:number], weights.tensors()[number:]  # which are joined anyway
        return [*(weight.contiguous() for weight in own), *clones]

    def split(self, weights: Tensors, joined: Tensors) -> list[Tensor | None]:
        return list(ExpertWeights.of(weights, self.parameters).split(joined))

    def passes(self, weights: Tensors, direction: Direction | None = None) -> PlainPasses:
        of_all = ExpertWeights.of(weights, self.parameters)
        return PlainPasses(of_all if direction else of_all.join(), self.activation)

    def dw(
        self, dy_SW: Tensor, x_SW: Tensor, slots: ExpertSlots, tiles: Any, gradients: Tensors, hidden: Any,
        base: Tensor | None = None,
    ) -> Tensors:  # fmt: skip
        dhidden_R2F, active_RF = gradients
        return passes.dw(dy_SW, x_SW, slots, dhidden_R2F, active_RF, base, has_bias=self.has_bias)

    def delayed_dw(
        self, dy_SW: Tensor, x_SW: Tensor, slots: ExpertSlots, tiles: Any, dactive: Tensor, hidden: Tensor,
        base: Tensor | None, delayed: Tensor | None,
    ) -> Tensors:  # fmt: skip
        of_layers = dy_SW, x_SW, slots, dactive, hidden, base, delayed
        return passes.delayed_dw(*of_layers, self.activation, has_bias=self.has_bias)


PLAIN, BIASED = PlainFormat(GemmFormats()), PlainFormat(GemmFormats(), has_bias=True)
