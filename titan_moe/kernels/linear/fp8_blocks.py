"""A linear layer with its three GEMMs in fp8, with scales of blocks (arXiv:2412.19437, section 3.3).

T tokens · I input width · O output width · i, o blocks of 128 along them · M tiles of 128 tokens

    y  = x · Wᵀ    sums over I; a scale for 1 x 128 of x, for 128 x 128 of W
    dx = dy · W    sums over O; a scale for 1 x 128 of dy, for the same 128 x 128 of W
    dW = dyᵀ · x   sums over T; a scale for 128 tokens of a column of both

The layer is one expert that gets all tokens: casts and GEMMs are those of experts (kernels/experts/fp8/passes.py), on
Hopper block_mm.py and block_weight_grad.py. Products of 128 leave the matrix units and are added in fp32. For dW the
codes of x and dy are rounded again along tokens (kernels/experts/fp8/requantized.py); all scales are powers of two, so
only codes that fall below the smallest one change. kernels/formats/linear.py, the definition of "fp8_blockwise", rounds
both factors of dW once. Any number of tokens will do: a tile that is not full masks its rows.

Physics: 6·T·I·O FLOPs in matrix units of twice the rate of bf16. Beside the GEMMs, forward reads 2·T·I + 2·I·O bytes
and writes T·I + I·O; backward reads 3·T·O + T·I + 2·I·O and writes 2·T·O + T·I + I·O. So wide layers are bound by the
GEMMs, narrow ones by the passes around them. Weights are quantised in each direction, as stored or transposed: no codes
are kept while FSDP has freed the weight. Kept for backward are codes and scales of x, 33 / 64 of bf16's bytes. dW has
I·O / 2 ** 15 tiles of 256 x 128, each summed over all tokens by one thread block: less than one a multiprocessor for
narrow layers.
"""

import torch
from torch import Tensor

from titan_moe.kernels.experts.fp8.packed import BLOCK
from titan_moe.kernels.experts.fp8.passes import sum_over_slots, times_weight
from titan_moe.kernels.experts.fp8.requantized import requantized_slots
from titan_moe.kernels.experts.fp8.rows import quantize_apart
from titan_moe.kernels.experts.fp8.weights import quantize_one_way
from titan_moe.kernels.experts.tiles import Tiles, plan_tiles
from titan_moe.kernels.linear.quantized import linear_op, linear_reference
from titan_moe.kernels.registry import Kernel, register


def fp8_block_linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """y = x · Wᵀ: [..., I] -> [..., O] in x's dtype; the gradient of the weight is in the weight's.

    Raises: ValueError if I or O is no multiple of 128.
    """
    if any(width % BLOCK for width in weight_OI.shape):
        outputs, inputs = weight_OI.shape
        raise ValueError(
            f"a linear layer in fp8_blockwise needs widths that are multiples of {BLOCK}, not {inputs} and {outputs}; "
            'take precision.linears = "fp8_rowwise", or precision.backend = "emulated"'
        )
    y_TO, *_ = _linear(x.flatten(0, -2).contiguous(), weight_OI)
    return y_TO.unflatten(0, x.shape[:-1])


def _forward(x_TI: Tensor, weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, and codes and scales of x."""
    x = quantize_apart(x_TI, BLOCK)
    y_TO = times_weight(x, quantize_one_way(weight_OI[None], BLOCK, transposed=False), _one_expert(x_TI)[1])
    return y_TO.to(x_TI.dtype), *x


def _backward(
    dy_TO: Tensor, codes_TI: Tensor, scales_Ti: Tensor, weight_OI: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight; empty ones where they are not needed."""
    dy, (offsets, tiles) = quantize_apart(dy_TO, BLOCK), _one_expert(dy_TO)
    dx_TI, dweight_OI = dy_TO.new_empty(0), weight_OI.new_empty(0)
    if needs[0]:
        weight = quantize_one_way(weight_OI[None], BLOCK, transposed=True)
        dx_TI = times_weight(dy, weight, tiles).to(dy_TO.dtype)
        del weight
    if needs[1] and not len(dy_TO):
        dweight_OI = torch.zeros_like(weight_OI)
    elif needs[1]:
        factors = requantized_slots(*dy, tiles), requantized_slots(codes_TI, scales_Ti, tiles)
        dweight_OI = sum_over_slots(*factors, offsets)[0].to(weight_OI.dtype)
    return dx_TI, dweight_OI


def _one_expert(x_TI: Tensor) -> tuple[Tensor, Tiles]:
    """The end of all tokens, as that of an expert's slots, and their tiles."""
    num_tokens = len(x_TI)
    end = torch.full((1,), num_tokens, dtype=torch.int32, device=x_TI.device)
    return end, plan_tiles(end, num_tokens, BLOCK)


_linear = linear_op("fp8_block_linear", _forward, _backward, BLOCK)
register(Kernel("fp8_block_linear", fp8_block_linear, linear_reference, needs_triton=True))
