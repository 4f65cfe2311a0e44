"""The format of routed experts as a value: how rows are sent and kept, which GEMMs are rounded, and the passes.

T tokens on this rank · S rows · R expert slots · e experts on this rank · D width of a row · W elements of a row as it
is sent and kept · F hidden width

An MLP (fused_mlp.py, dispatch/symm_mem/mlp.py) is composed of a format, of rows that are local or those of peers, of
what keeps them for backward, and of weight gradients that are computed now or later. It sends and keeps rows and
pre-activations, and does not read them. A new format is one file, and a row of formats.py.

    pass     computes                        from
    up       activation, pre-activation      rows, gate and up
    down     results of slots                activation, down
    d_down   gradient of pre-activation      gradients of results, down; gradients of scores
    d_up     gradients of slots              gradient of pre-activation, gate and up
    dw       gradients of weights            rows and their gradients, what `d_down` leaves
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from titan_moe.config.formats import GemmFormats
from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.experts.copy_blocks import TileSchedule
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import Tiles
from titan_moe.kernels.experts.weights import BIASES, MATRICES, ExpertWeights, Tensors

Direction = Literal["forward", "backward"]


class Work(NamedTuple):
    """The slots of a layer, and the order in which GEMMs compute them."""

    slots: ExpertSlots
    tiles: Tiles
    schedule: TileSchedule | None = None
    """With it, a GEMM gets its rows or puts its sums."""


class Passes(Protocol):
    """The passes that read weights. Rows are as `ExpertFormat.pack` makes them; with `base`, int64 [2] on the device,
    rows and pre-activations are those of several layers, and this layer's begin at row base[0] and slot base[1]."""

    def up(self, x_SW: Tensor, work: Work, hidden: Tensor, base: Tensor | None = None) -> Any:
        """The activation; the pre-activation is written into `hidden`."""

    def down(self, active: Any, work: Work, *, in_triton: bool = False) -> Tensor:
        """Results of slots, [R, D]; with a schedule or `in_triton` by a GEMM of Triton."""

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
        """What `d_up` and `dw` need, and gradients of scores. Gradients of activations are written into `dactive`, if
        it is given, for `delayed_dw`; with `delayed`, they and dy_SW are those of several layers."""

    def d_up(self, gradients: Any, work: Work, *, in_triton: bool = False) -> Tensor:
        """Gradients of slots, [R, D]."""


@dataclass(frozen=True)
class ExpertFormat(ABC):
    """A format; equal ones compute alike."""

    gemms: GemmFormats
    """The GEMMs that are rounded."""
    activation: SwiGLU = field(default=PLAIN_SWIGLU, kw_only=True)
    """What is between the projections: the kernels that round it compute it, too."""
    has_bias: bool = field(default=False, kw_only=True)
    """Whether experts have biases."""

    @property
    def name(self) -> str:
        """As operations take it."""
        numbers = () if self.activation == PLAIN_SWIGLU else self.activation
        return " ".join([str(self.gemms), *["biased"] * self.has_bias, *map(repr, numbers)])

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the experts' parameters."""
        return MATRICES + BIASES if self.has_bias else MATRICES

    @property
    def is_rounded(self) -> bool:
        """Whether rows are packed and weights are quantised."""
        return self.gemms.fprop != "compute"

    @property
    def rounds_weight_grads(self) -> bool:
        """Whether `dw` rounds too, by tile, and so needs the tiles of `d_down`."""
        return self.gemms.wgrad != "compute"

    @property
    def dw_reads_hidden(self) -> bool:
        """Whether `dw` needs the pre-activation, beside what `d_down` leaves."""
        return self.is_rounded and not self.rounds_weight_grads

    @abstractmethod
    def row_width(self, width: int, dtype: torch.dtype) -> int:
        """The elements of a row of `width` as it is sent and kept (W)."""

    @abstractmethod
    def pack(self, x_TD: Tensor) -> Tensor:
        """Rows as they are sent and kept, in the same dtype: [T, D] -> [T, W]."""

    @abstractmethod
    def unpack(self, x_SW: Tensor, count: Tensor | None = None) -> Tensor:
        """The inverse: [S, W] -> [S, D]. `count`, one int32 on the device, is the number of rows if it is less than S;
        rows past it are not written."""

    @abstractmethod
    def new_hidden(self, like: Tensor, num_slots: int, hidden: int) -> Tensor:
        """Memory for so many pre-activations as they are kept; `hidden` is F."""

    @abstractmethod
    def new_gradients(self, like: Tensor, num_slots: int, hidden: int) -> list[Tensor]:
        """Memory for what `d_down` leaves."""

    def new_weight_grads(self, like: Tensor, shape: Sequence[int]) -> list[Tensor]:
        """Memory for gradients of `parameters`, gate_up of this shape."""
        experts, _, hidden, width = shape
        shapes = {
            "gate_up": shape,
            "down": (experts, width, hidden),
            "gate_up_bias": shape[:3],
            "down_bias": (experts, width),
        }
        dtype = self.result_dtype(like.dtype)
        return [like.new_empty([*shapes[name]], dtype=dtype) for name in self.parameters]

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of results and gradients of inputs in `dtype`."""
        return dtype

    def quantize(self, gate_up: Tensor, down: Tensor, is_bf16: bool) -> list[Tensor]:
        """`ExpertWeights.codes` of own experts, [e, 2, F, D] and [e, D, F]; none by default. With `is_bf16`, weights
        are rounded to bf16 first, as other layouts gather them."""
        return []

    @abstractmethod
    def operands(self, weights: ExpertWeights) -> list[Tensor]:
        """What operations take of weights, own `parameters` first.

        Raises: ValueError for experts that the format does not take.
        """

    @abstractmethod
    def split(self, weights: Tensors, joined: Tensors) -> list[Tensor | None]:
        """Gradients of joined parameters -> those of `operands`; codes have none."""

    @abstractmethod
    def passes(self, weights: Tensors, direction: Direction | None = None) -> Passes:
        """The passes with `operands`: of one direction, each run once, or of both."""

    @abstractmethod
    def dw(
        self,
        dy_SW: Tensor,
        x_SW: Tensor,
        slots: ExpertSlots,
        tiles: Tiles | None,
        gradients: Tensors,
        hidden: Tensor | None,
        base: Tensor | None = None,
    ) -> Tensors:
        """Gradients of `parameters`, in one piece each; `gradients` are what `d_down` leaves."""

    @abstractmethod
    def delayed_dw(
        self,
        dy_SW: Tensor,
        x_SW: Tensor,
        slots: ExpertSlots,
        tiles: Tiles | None,
        dactive: Tensor,
        hidden: Tensor,
        base: Tensor | None,
        delayed: Tensor | None,
    ) -> Tensors:
        """The same from what `d_down` wrote into `dactive` and what it read."""
