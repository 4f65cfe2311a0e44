"""One GEMM for each expert over its own slots, in low-precision formats, on any device.

R expert slots, sorted by expert · I input width · O output width · C any width · e local experts · n blocks of slots ·
b slots a block

Each expert is a linear layer of its own (linear.py): its slots are rounded in blocks counted from its own begin, and
scales of whole tensors or of all tokens are those of its own slots. So no result depends on which experts share a rank.

Physics: experts begin anywhere, blocks do not. Slots are copied to a layout in which each expert begins with a block,
and zeros fill its last one: at most R / b + e blocks, a size that the host knows. No border is read by the host, so
the operation can be captured in a CUDA graph. A batched product takes each block's weight, copied once a block: 1 GiB
at a time. Like linear.py it is exact and not fast, and needs products in fp32 that are not TF32.

Slots past `offsets_e[-1]` are not read. They are zero in outputs and gradients. NaN or an infinity in one expert's
slots makes the weight gradients of all experts NaN.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.config.formats import GemmFormats
from titan_moe.kernels.experts.grouped_mm import GroupedGemm, grouped_mm_reference
from titan_moe.kernels.experts.weights import ExpertParameter
from titan_moe.kernels.formats.linear import rounding
from titan_moe.kernels.formats.operands import Rounding, round_dgrad, round_fprop, round_wgrad
from titan_moe.kernels.registry import Kernel, register

SLOTS_PER_BLOCK = 128
"""A multiple of every format's blocks along slots."""
CHUNK_ELEMENTS = 1 << 28


@cache
def emulated_grouped_mm(
    formats: GemmFormats, power_of_two_scales: bool = False, in_triton: bool = False
) -> GroupedGemm:
    """The grouped GEMM whose three products have these formats, rounded by Triton kernels if asked for.

    Equal arguments give the same function.
    """

    def gemm(x_RI: Tensor, own_eOI: Tensor, clones_cOI: Tensor | None, offsets_e: Tensor) -> Tensor:
        names = formats.fprop, formats.dgrad, formats.wgrad
        return grouped_mm_in_formats(x_RI, own_eOI, clones_cOI, offsets_e, *names, power_of_two_scales, in_triton)

    return gemm


def grouped_reference(
    x_RI: Tensor,
    own_eOI: Tensor,
    clones_cOI: Tensor | None,
    offsets_e: Tensor,
    fprop: str,
    dgrad: str,
    wgrad: str,
    power_of_two_scales: bool = False,
    in_triton: bool = False,
) -> Tensor:
    """The product, not rounded."""
    assert fprop == dgrad == wgrad == "compute", "formats are tested in tests/kernels/formats/"
    return grouped_mm_reference(x_RI, own_eOI, clones_cOI, offsets_e)


class BlockLayout(NamedTuple):
    """Where slots lie when each expert begins with a block."""

    expert_n: Tensor
    """The expert of each block."""
    slots_nb: Tensor
    """The slot at each place."""
    is_taken_nb: Tensor
    """Whether a place has a slot."""
    places_R: Tensor
    """The place of each slot."""
    is_valid_R: Tensor
    """Whether an expert has the slot."""

    @staticmethod
    def of(offsets_e: Tensor, num_slots: int, length: int = SLOTS_PER_BLOCK) -> "BlockLayout":
        """For blocks of `length` slots."""
        num_experts = offsets_e.shape[0]
        ends_e = offsets_e.long()
        begins_e = torch.cat([ends_e.new_zeros(1), ends_e[:-1]])
        block_ends_e = ((ends_e - begins_e + length - 1) // length).cumsum(0)
        first_places_e = torch.cat([ends_e.new_zeros(1), block_ends_e[:-1]]) * length
        block_n = torch.arange(-(-num_slots // length) + num_experts, device=offsets_e.device)
        expert_n = torch.searchsorted(block_ends_e, block_n, right=True).clamp(max=num_experts - 1)
        place_nb = block_n[:, None] * length + torch.arange(length, device=offsets_e.device)
        slots_nb = place_nb - first_places_e[expert_n, None] + begins_e[expert_n, None]
        is_taken_nb = slots_nb < ends_e[expert_n, None]
        slot_R = torch.arange(num_slots, device=offsets_e.device)
        expert_R = torch.searchsorted(ends_e, slot_R, right=True).clamp(max=num_experts - 1)
        is_valid_R = slot_R < ends_e[-1]
        places_R = torch.where(is_valid_R, slot_R - begins_e[expert_R] + first_places_e[expert_R], 0)
        return BlockLayout(expert_n, slots_nb.clamp(max=num_slots - 1), is_taken_nb, places_R, is_valid_R)

    def to_blocks(self, x_RC: Tensor) -> Tensor:
        """[R, C] -> [n, b, C], zero where no slot is."""
        return torch.where(self.is_taken_nb[..., None], x_RC[self.slots_nb], 0)

    def to_slots(self, x_nbC: Tensor) -> Tensor:
        """The inverse of `to_blocks`, zero past the last slot."""
        return torch.where(self.is_valid_R[:, None], x_nbC.flatten(0, 1)[self.places_R], 0)

    def merge(self, num_experts: int) -> Callable[[Tensor], Tensor]:
        """Map largest magnitudes of blocks of slots to those of their experts."""

        def merge(amax_n11: Tensor) -> Tensor:
            largest_e = amax_n11.new_zeros(num_experts, *amax_n11.shape[1:])
            index = self.expert_n.view(-1, *[1] * (amax_n11.ndim - 1)).expand_as(amax_n11)
            return largest_e.scatter_reduce(0, index, amax_n11, "amax")[self.expert_n]

        return merge

    def how(self, format: str, power_of_two_scales: bool, in_triton: bool, num_experts: int) -> Rounding:
        """Rounding of blocks as parts of their experts' tensors."""
        return rounding(format, power_of_two_scales, in_triton)._replace(merge=self.merge(num_experts))

    def chunks(self, elements: int) -> Iterator[slice]:
        """Cut the blocks so that a tensor of so many elements a block stays small."""
        length = max(1, CHUNK_ELEMENTS // max(elements, 1))
        return (slice(i, i + length) for i in range(0, self.expert_n.shape[0], length))


def _times_weights(x_nbC: Tensor, weight_eCK: Tensor, layout: BlockLayout) -> Tensor:
    """[n, b, C] and the weight of each block's expert -> [n, b, K]."""
    chunks = layout.chunks(weight_eCK[0].numel())
    return torch.cat([x_nbC[chunk] @ weight_eCK[layout.expert_n[chunk]] for chunk in chunks])


@torch.library.custom_op("titan_moe::emulated_grouped_mm", mutates_args=())
def grouped_mm_in_formats(
    x_RI: Tensor,
    own_eOI: Tensor,
    clones_cOI: Tensor | None,
    offsets_e: Tensor,
    fprop: str,
    dgrad: str,
    wgrad: str,
    power_of_two_scales: bool = False,
    in_triton: bool = False,
) -> Tensor:
    """`emulated_grouped_mm` with names of formats."""
    weight_eOI = ExpertParameter(own_eOI, clones_cOI).join()
    if not x_RI.numel():
        return x_RI.new_zeros(x_RI.shape[0], weight_eOI.shape[1])
    layout = BlockLayout.of(offsets_e, x_RI.shape[0])
    how = layout.how(fprop, power_of_two_scales, in_triton, weight_eOI.shape[0])
    left_nbI, right_eOI = round_fprop(layout.to_blocks(x_RI), weight_eOI, how)
    return layout.to_slots(_times_weights(left_nbI, right_eOI.mT, layout)).to(x_RI.dtype)


@grouped_mm_in_formats.register_fake
def _(x_RI: Tensor, own_eOI: Tensor, *_: Any) -> Tensor:
    return x_RI.new_empty(x_RI.shape[0], own_eOI.shape[1])


@torch.library.custom_op("titan_moe::emulated_grouped_mm_dx", mutates_args=())
def _grouped_mm_dx(
    grad_RO: Tensor,
    own_eOI: Tensor,
    clones_cOI: Tensor | None,
    offsets_e: Tensor,
    dgrad: str,
    power_of_two_scales: bool,
    in_triton: bool,
) -> Tensor:
    weight_eOI = ExpertParameter(own_eOI, clones_cOI).join()
    if not grad_RO.numel():
        return grad_RO.new_zeros(grad_RO.shape[0], weight_eOI.shape[2])
    layout = BlockLayout.of(offsets_e, grad_RO.shape[0])
    how = layout.how(dgrad, power_of_two_scales, in_triton, weight_eOI.shape[0])
    left_nbO, right_eOI = round_dgrad(layout.to_blocks(grad_RO), weight_eOI, how)
    return layout.to_slots(_times_weights(left_nbO, right_eOI, layout)).to(grad_RO.dtype)


@_grouped_mm_dx.register_fake
def _(grad_RO: Tensor, own_eOI: Tensor, *_: Any) -> Tensor:
    return grad_RO.new_empty(grad_RO.shape[0], own_eOI.shape[2])


@torch.library.custom_op("titan_moe::emulated_grouped_mm_dw", mutates_args=())
def _grouped_mm_dw(
    grad_RO: Tensor,
    x_RI: Tensor,
    offsets_e: Tensor,
    wgrad: str,
    power_of_two_scales: bool,
    in_triton: bool,
    dtype: torch.dtype,
) -> Tensor:
    num_experts = offsets_e.shape[0]
    if not grad_RO.shape[0]:
        return grad_RO.new_zeros(num_experts, grad_RO.shape[1], x_RI.shape[1], dtype=dtype)
    layout = BlockLayout.of(offsets_e, grad_RO.shape[0])
    how = layout.how(wgrad, power_of_two_scales, in_triton, num_experts)
    left_nbO, right_nbI = round_wgrad(layout.to_blocks(grad_RO), layout.to_blocks(x_RI), how)
    dweight_eOI = left_nbO.new_zeros(num_experts, grad_RO.shape[1], x_RI.shape[1])
    is_of_expert_en = layout.expert_n == torch.arange(num_experts, device=offsets_e.device)[:, None]
    for chunk in layout.chunks(dweight_eOI[0].numel()):
        product_nOI = left_nbO[chunk].mT @ right_nbI[chunk]
        # a product: sums of a fixed order, as no scatter's
        selects_en = is_of_expert_en[:, chunk].to(product_nOI.dtype)
        dweight_eOI += (selects_en @ product_nOI.flatten(1)).view_as(dweight_eOI)
    return dweight_eOI.to(dtype)


@_grouped_mm_dw.register_fake
def _(
    grad_RO: Tensor,
    x_RI: Tensor,
    offsets_e: Tensor,
    wgrad: str,
    power_of_two_scales: bool,
    in_triton: bool,
    dtype: torch.dtype,
) -> Tensor:
    return grad_RO.new_empty(offsets_e.shape[0], grad_RO.shape[1], x_RI.shape[1], dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _, ctx.dgrad, ctx.wgrad, power_of_two_scales, in_triton = inputs
    ctx.options = power_of_two_scales, in_triton
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
    x_RI, own_eOI, clones_cOI, offsets_e = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    dx_RI, dweight, dclones = None, None, None
    if needs_x:
        dx_RI = _grouped_mm_dx(grad_RO, own_eOI, clones_cOI, offsets_e, ctx.dgrad, *ctx.options)
    if needs_weight:
        dweight = _grouped_mm_dw(grad_RO, x_RI, offsets_e, ctx.wgrad, *ctx.options, own_eOI.dtype)
        if clones_cOI is not None:
            dweight, dclones = dweight.split([own_eOI.shape[0], clones_cOI.shape[0]])
    return dx_RI, dweight, dclones, *[None] * 6


grouped_mm_in_formats.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.titan_moe.emulated_grouped_mm)
def _count(x_shape: tuple[int, int], own_shape: tuple[int, int, int], *_: Any, **__: Any) -> int:
    return 2 * x_shape[0] * own_shape[1] * own_shape[2]  # every slot, as if all were taken


@register_flop_formula(torch.ops.titan_moe.emulated_grouped_mm_dx)
def _count_dx(grad_shape: tuple[int, int], own_shape: tuple[int, int, int], *_: Any, **__: Any) -> int:
    return 2 * grad_shape[0] * own_shape[1] * own_shape[2]


@register_flop_formula(torch.ops.titan_moe.emulated_grouped_mm_dw)
def _count_dw(grad_shape: tuple[int, int], x_shape: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * grad_shape[0] * grad_shape[1] * x_shape[1]


register(Kernel("emulated_grouped_mm", grouped_mm_in_formats, grouped_reference))
