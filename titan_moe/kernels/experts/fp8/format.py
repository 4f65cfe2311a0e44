"""Routed experts in fp8: rows, weights, activations and gradients are rounded to e4m3.

S rows · R expert slots · e experts that the rank computes · D width of a row · F hidden width

A row is sent and kept as packed codes (packed.py), which have half the bytes of bf16: experts round what they receive
to the same numbers again, so results and gradients of rows have the same bits either way, and there is no setting for
it. Rows are packed in dispatch, and gradients of results in the backward of combine; sums are sent as they are
(arXiv:2412.19437, section 3.3.3).

Physics: the GEMMs have twice the rate of bf16; what stands beside them are passes over S·D elements to quantise rows,
over R·F to quantise activations and gradients, and over R·(2·D + 3·F) bytes to transpose what the gradients of weights
sum. Kept for backward are rows and pre-activations in e4m3, S·D + 2·R·F bytes, half of bf16's. Packing and unpacking
are passes of 3·S·D bytes at memory's rate, a tenth of what the links take for the half that is not sent. The reference
is the composite of composite_mlp.py with emulated GEMMs. Here scales are powers of two; with scales of rows, gradients
of weights have one scale an expert (transposed.py), and with scales of blocks their factors are rounded twice
(requantized.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from titan_moe.config.formats import GemmFormats
from titan_moe.kernels.experts.format import Direction, ExpertFormat, Work
from titan_moe.kernels.experts.fp8 import passes
from titan_moe.kernels.experts.fp8.packed import BLOCK, CODES, WHOLE_ROW, num_scales, packed_width
from titan_moe.kernels.experts.fp8.passes import Activations, HiddenGradients, QuantizedExperts
from titan_moe.kernels.experts.fp8.rows import RESULTS, quantize_rows, unpack_rows
from titan_moe.kernels.experts.fp8.weights import WeightCodes, new_codes, quantize_one_way, quantize_weight
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import Tiles
from titan_moe.kernels.experts.weights import MATRICES, ExpertWeights, Tensors

NUM_CODES = 8
"""Tensors of codes and scales, of both weights, both ways."""


@torch.library.custom_op("titan_moe::quantize_experts", mutates_args=())
def _quantize_experts(gate_up: Tensor, down: Tensor, is_bf16: bool, columns: int) -> list[Tensor]:
    dtype = torch.bfloat16 if is_bf16 else gate_up.dtype
    return _by_direction(quantize_weight(weight, dtype, columns) for weight in (gate_up.flatten(1, 2), down))


@_quantize_experts.register_fake
def _(gate_up: Tensor, down: Tensor, is_bf16: bool, columns: int) -> list[Tensor]:
    weights = gate_up.flatten(1, 2), down
    return _by_direction([new_codes(weight, columns, transposed=way) for way in (False, True)] for weight in weights)


def _by_direction(ways: Iterable[list[WeightCodes]]) -> list[Tensor]:
    """Both weights as stored, and both transposed."""
    return [tensor for both in zip(*ways, strict=True) for tensor in QuantizedExperts(*both).tensors()]


def parameters_of(weights: Tensors) -> ExpertWeights:
    """Those of `Fp8Format.operands`, which codes may follow."""
    return ExpertWeights.of(weights[: len(weights) % NUM_CODES])


def codes_of(weights: Tensors, columns: int = WHOLE_ROW, *, for_backward: bool = False) -> QuantizedExperts:
    """The codes of `Fp8Format.operands`, for one direction. Where they were not made before, they are made for each
    use: so autograd keeps the parameters, which FSDP frees after forward and gathers again, and no codes of all
    layers."""
    if len(weights) > NUM_CODES:
        stored, transposed = weights[-NUM_CODES : -NUM_CODES // 2], weights[-NUM_CODES // 2 :]
        return QuantizedExperts.of(transposed if for_backward else stored)
    gate_up, down = (weight.detach() for weight in parameters_of(weights).join().tensors())
    both = gate_up.flatten(1, 2), down
    return QuantizedExperts(*(quantize_one_way(weight, columns, transposed=for_backward) for weight in both))


class Fp8Passes:
    """Those of passes.py. All GEMMs are Triton's."""

    def __init__(self, format: "Fp8Format", weights: Tensors) -> None:
        self.format, self.weights = format, weights

    @cached_property
    def forward(self) -> QuantizedExperts:
        """Backward needs these too where it computes pre-activations again."""
        return codes_of(self.weights, self.format.columns)

    @cached_property
    def backward(self) -> QuantizedExperts:
        """Transposed."""
        return codes_of(self.weights, self.format.columns, for_backward=True)

    def up(self, x_SW: Tensor, work: Work, hidden: Tensor, base: Tensor | None = None) -> Activations:
        return passes.up(
            x_SW.view(CODES), work.slots, self.forward, work.tiles, work.schedule, hidden, base, self.format.activation
        )[0]

    def down(self, active: Activations, work: Work, *, in_triton: bool = False) -> Tensor:
        return passes.down(active, self.forward, work.tiles, work.schedule)

    def d_down(
        self,
        dy_SW: Tensor,
        x_SW: Tensor,
        work: Work,
        hidden: Tensor,
        base: Tensor | None = None,
        dactive: Tensor | None = None,
        delayed: Tensor | None = None,
    ) -> tuple[HiddenGradients, Tensor]:
        rows, of_work = (dy_SW.view(CODES), x_SW.view(CODES)), (work.tiles, work.schedule)
        places, rounds = (base, dactive, delayed), self.format.rounds_weight_grads
        return passes.d_down(
            *rows, work.slots, self.backward, hidden, *of_work, *places,
            rounds_weight_gradients=rounds, activation=self.format.activation,
        )  # fmt: skip

    def d_up(self, gradients: HiddenGradients, work: Work, *, in_triton: bool = False) -> Tensor:
        return passes.d_up(gradients, self.backward, work.tiles, work.schedule)


@dataclass(frozen=True)
class Fp8Format(ExpertFormat):
    """Operands in e4m3, sums in fp32, results in bf16. Weights with codes are not read."""

    columns: int
    """Columns of a scale (packed.py): of a row, or of a block."""

    def row_width(self, width: int, dtype: torch.dtype) -> int:
        return packed_width(width, self.columns) // dtype.itemsize

    def pack(self, x_TD: Tensor) -> Tensor:
        return quantize_rows(x_TD.contiguous(), self.columns).view(x_TD.dtype)

    def unpack(self, x_SW: Tensor, count: Tensor | None = None) -> Tensor:
        return unpack_rows(x_SW.view(CODES), x_SW.dtype, count, columns=self.columns)

    def new_hidden(self, like: Tensor, num_slots: int, hidden: int) -> Tensor:
        return like.new_empty(num_slots, packed_width(2 * hidden, self.columns), dtype=CODES)

    def new_gradients(self, like: Tensor, num_slots: int, hidden: int) -> list[Tensor]:
        rounds, columns = self.rounds_weight_grads, self.columns
        shapes = (
            [[num_slots, num_scales(width, columns)] for width in (2 * hidden, hidden)]
            if columns
            else [[num_slots], [num_slots, 2]]
        )
        scales, factors = (like.new_empty(shape, dtype=torch.float32) for shape in shapes)
        codes_R2F = like.new_empty(num_slots, 2 * hidden, dtype=CODES)
        dactive_RF = like.new_empty(0 if rounds else num_slots, hidden, dtype=RESULTS)
        active_RF = like.new_empty(num_slots if rounds else 0, hidden, dtype=CODES)
        return [codes_R2F, scales, dactive_RF, active_RF, factors]

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return RESULTS

    def quantize(self, gate_up: Tensor, down: Tensor, is_bf16: bool) -> list[Tensor]:
        """Codes for forward, then those for backward."""
        return _quantize_experts(gate_up, down, is_bf16, self.columns)

    def operands(self, weights: ExpertWeights) -> list[Tensor]:
        """Weights, for their gradients, and codes if they were made before: these are of own weights alone.

        Raises: ValueError for experts with biases, or with clones beside codes, or whose widths are no multiples of a
            block's columns.
        """
        columns = self.columns
        if columns and any(width % columns for width in weights.down.own.shape[1:]):
            width, hidden = weights.down.own.shape[1:]
            raise ValueError(
                f"experts in fp8_blockwise need widths that are multiples of {columns}, not {width} and {hidden}; take "
                'precision.experts = "fp8_rowwise", or precision.backend = "emulated"'
            )
        if weights.names() != MATRICES:
            raise ValueError('experts in fp8 have no biases; take precision.experts = "compute"')
        if weights.codes and weights.gate_up.clones is not None:
            raise ValueError("codes stand for weights here, and clones are of weights; leave one out")
        return [*weights.tensors(), *weights.codes]

    def split(self, weights: Tensors, joined: Tensors) -> list[Tensor | None]:
        parameters = parameters_of(weights).split(joined)
        return [*parameters, *(None,) * (len(weights) - len(parameters))]

    def passes(self, weights: Tensors, direction: Direction | None = None) -> Fp8Passes:
        passes = Fp8Passes(self, weights)
        if direction:
            getattr(passes, direction)  # makes the codes
        return passes

    def dw(
        self, dy_SW: Tensor, x_SW: Tensor, slots: ExpertSlots, tiles: Tiles | None, gradients: Tensors,
        hidden: Tensor | None, base: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rows, of_hidden = (dy_SW.view(CODES), x_SW.view(CODES), slots), HiddenGradients(*gradients)
        if self.rounds_weight_grads:
            assert tiles is not None, "gradients are rounded by tile"
            return passes.dw(*rows, of_hidden, tiles, base)
        assert hidden is not None, "activations are computed again"
        return passes.plain_dw(*rows, of_hidden, hidden, base, self.activation)

    def delayed_dw(
        self, dy_SW: Tensor, x_SW: Tensor, slots: ExpertSlots, tiles: Tiles | None, dactive: Tensor, hidden: Tensor,
        base: Tensor | None, delayed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rows = dy_SW.view(CODES), x_SW.view(CODES), slots, dactive, hidden
        return passes.delayed_dw(
            *rows, tiles, base, delayed,
            rounds_weight_gradients=self.rounds_weight_grads, columns=self.columns, activation=self.activation,
        )  # fmt: skip


ROWWISE, BLOCKWISE = GemmFormats(*("fp8_rowwise",) * 3), GemmFormats(*("fp8_blockwise",) * 3)
FP8_ROWWISE, FP8_ROWWISE_PLAIN_WGRAD, FP8_BLOCKWISE, FP8_BLOCKWISE_PLAIN_WGRAD = FORMATS = [
    Fp8Format(gemms, columns)
    for rounded, columns in ((ROWWISE, WHOLE_ROW), (BLOCKWISE, BLOCK))
    for gemms in (rounded, replace(rounded, wgrad="compute"))
]
"""With scales of rows, and of 128 columns of rows and slots, and of 128 x 128 of weights: products of 128 leave the
matrix units and are added in fp32 (arXiv:2412.19437, section 3.3.2). Each with weight gradients in fp8, and in bf16."""
