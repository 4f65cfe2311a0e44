"""Every Triton kernel compiles for an H200 at full size, within its registers and shared memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.attention.max_logits import launch as launch_max_logits
from titan_moe.kernels.clones.plan import launch_plan
from titan_moe.kernels.experts.bias_grads import add_bias_scores, expert_sums
from titan_moe.kernels.experts.fp8 import swiglu as fp8_swiglu
from titan_moe.kernels.experts.fp8 import swiglu_backward as fp8_swiglu_backward
from titan_moe.kernels.experts.fp8 import transposed as fp8_transposed
from titan_moe.kernels.experts.fp8.block_mm import block_mm
from titan_moe.kernels.experts.fp8.block_weight_grad import block_weight_grad
from titan_moe.kernels.experts.fp8.packed import BLOCK, CODES, WHOLE_ROW, packed_width
from titan_moe.kernels.experts.fp8.passes import BLOCK_CUT
from titan_moe.kernels.experts.fp8.passes import CUT as FP8_CUT
from titan_moe.kernels.experts.fp8.requantized import requantized_rows, requantized_slots
from titan_moe.kernels.experts.fp8.rows import quantize_apart, quantize_rows, unpack_rows
from titan_moe.kernels.experts.fp8.weight_grad import weight_grad as fp8_weight_grad
from titan_moe.kernels.experts.fp8.weights import quantize_one_way, quantize_weight
from titan_moe.kernels.experts.gather_mm import gather_mm
from titan_moe.kernels.experts.low_rank import low_products, low_weight_grads
from titan_moe.kernels.experts.low_rank_backward import swiglu_backward_with_factors
from titan_moe.kernels.experts.slot_mm import slot_mm
from titan_moe.kernels.experts.slot_sum import slot_rows, slot_sum
from titan_moe.kernels.experts.swiglu_backward import swiglu_backward
from titan_moe.kernels.experts.tiles import GemmTiles, plan_tiles
from titan_moe.kernels.experts.up import expert_up
from titan_moe.kernels.experts.weight_grad import expert_weight_grad
from titan_moe.kernels.formats.fused_rounding import launch_rounding
from titan_moe.kernels.linear.transposed import transpose
from titan_moe.kernels.loss.scaled_cast import scaled_cast
from titan_moe.kernels.loss.softmax_gradient import softmax_gradient
from titan_moe.kernels.loss.softmax_over_parts import part_gradient, part_statistics
from titan_moe.kernels.optim.accumulate import launch_accumulate
from titan_moe.kernels.optim.adamw import Rule, Shard, launch_adamw
from titan_moe.kernels.optim.adamw_8bit import Shard8, launch_adamw_8bit
from titan_moe.kernels.optim.moments_8bit import Moment
from titan_moe.kernels.optim.muon import Decay, Momentum, launch_momentum, launch_step
from titan_moe.kernels.optim.symmetric import launch_symmetric_product
from titan_moe.kernels.permute.counting_sort import scores_of_slots, sort_assignments
from titan_moe.kernels.rope.backward import rotary_backward
from titan_moe.kernels.rope.forward import rotary_forward
from titan_moe.kernels.rope.latent_heads import launch_backward, launch_forward
from titan_moe.kernels.router.backward import route_backward
from titan_moe.kernels.router.forward import route_forward
from titan_moe.kernels.router.routing import Routing, RoutingRule
from titan_moe.kernels.symm_mem.arrays import HEADER_WORDS, SymmArray, SymmArrays
from titan_moe.kernels.symm_mem.assignments import get_assignments, pick_scores, put_scores
from titan_moe.kernels.symm_mem.barrier import symm_barrier
from titan_moe.kernels.symm_mem.clones import add_gradients, pull_weights, send_counts, stage_gradients, stage_weights
from titan_moe.kernels.symm_mem.row_plan import RowPlan, exchange_counts, plan_rows
from titan_moe.kernels.symm_mem.rows import get_rows, put_rows, sum_partial_results
from titan_moe.kernels.symm_mem.tile_schedule import TileSchedule, clear_rows_without_slots, schedule_tiles

pytestmark = pytest.mark.slow

S, K, E, D, F = 16_384, 8, 16, 2048, 768
V, RANK = 151_936, 16
R = S * K


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def single(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def index(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def codes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=CODES, device="meta")


def packed(rows: int, width: int, columns: int = WHOLE_ROW) -> Tensor:
    """Codes with their scales behind them."""
    return codes(rows, packed_width(width, columns))


GPT_OSS = SwiGLU(7.0, 1.702, 1.0)
QWEN3 = RoutingRule("softmax", 8)
DEEPSEEK_V3 = RoutingRule("sigmoid", 8, 8, 4, route_scale=2.5)


def route(num_experts: int, rule: RoutingRule, *ids: Tensor | None) -> Routing:
    return route_forward(single(2, S, num_experts), single(num_experts), rule, *ids)


def route_grad(num_experts: int, rule: RoutingRule, *balance: Tensor | None) -> Tensor:
    ids_BNK = single(2, S, rule.top_k).long()
    of_scores = (rule.score_fn, rule.top_k, rule.normalize_topk, rule.route_scale)
    return route_backward(single(2, S, num_experts), ids_BNK, single(2, S, rule.top_k), *balance, *of_scores)


def base() -> Tensor:
    """Where a layer begins in tensors of several layers."""
    return torch.empty(2, dtype=torch.int64, device="meta")


def in_arena(width: int) -> dict[str, Tensor]:
    """Rows of several layers, and results of so many columns that lie behind those of others."""
    return {"base": base(), "out": half(R, width), "out_base": base()}


def back_in_fp8(where: Tensor | None = None, columns: int = WHOLE_ROW, activation: SwiGLU = PLAIN_SWIGLU) -> Any:
    kept, x, dy = packed(R, 2 * F, columns), packed(S, D, columns), packed(S, D, columns)
    of_slots = half(R, F), kept, single(R), index(R), index(E), x, dy, where, where
    return fp8_swiglu_backward.swiglu_backward(*of_slots, columns=columns, activation=activation)


def tiles(usual_slots: int | None = None) -> Any:
    return plan_tiles(index(E), R, 128, usual_slots=usual_slots)


def schedule() -> TileSchedule:
    address_S = torch.empty(S, dtype=torch.int64, device="meta")
    num_tiles = tiles().experts_M.numel()
    return TileSchedule(index(1), index(S), address_S, index(num_tiles), index(S, K), index(S), address_S, index(S))


def adamw(param: Tensor, moments: Callable[..., Tensor]) -> None:
    n = param.numel()
    shard = Shard(single(), 2**40 + 1, param, param, moments(n), moments(n))
    launch_adamw(shard, Rule(single(), single(), single(), 0.9, 0.999, 1e-8, 0.1))


def muon_rule(nesterov: bool) -> Momentum:
    return Momentum(single(), single(), 0.95, nesterov)


def adamw_8bit(param: Tensor) -> None:
    n = param.numel()
    moment = Moment(torch.empty(n, dtype=torch.uint8, device="meta"), single(n // 256))
    shard = Shard8(single(), 2**40 + 1, param, param, moment, moment)
    launch_adamw_8bit(shard, Rule(single(), single(), single(), 0.9, 0.95, 1e-8, 0.1))


def gather_in_fp8(copies: TileSchedule | None = None, where: Tensor | None = None) -> object:
    x, weight_eIO = packed(S, D), codes(E, 2 * F, D).mT
    places = {} if where is None else in_arena(2 * F)
    scales_eO = single(E, 2 * F)
    return gather_mm(
        x, index(R), weight_eIO, tiles(), FP8_CUT, copies, scales=scales_eO, dtype=torch.bfloat16, **places
    )


def slots_in_fp8(copies: TileSchedule | None = None) -> object:
    scales = single(R), single(E, D)
    weight_eIO = codes(E, D, F).mT
    return slot_mm(codes(R, F), weight_eIO, tiles(), schedule=copies, cut=FP8_CUT, scales=scales, dtype=torch.bfloat16)


NARROW_BLOCK_CUT = BLOCK_CUT._replace(outputs=BLOCK)


def gather_in_blocks(
    copies: TileSchedule | None = None, where: Tensor | None = None, width: int = D, cut: GemmTiles = BLOCK_CUT
) -> object:
    scales = single(E, 2 * F // BLOCK, width // BLOCK)
    return gather_mm(
        packed(S, width, BLOCK), index(R), codes(E, 2 * F, width).mT, tiles(), cut, copies,
        scales=scales, columns=BLOCK, dtype=torch.bfloat16, **({} if where is None else in_arena(2 * F)),
    )  # fmt: skip


def slots_in_blocks(
    copies: TileSchedule | None = None, usual_slots: int | None = None, cut: GemmTiles = BLOCK_CUT
) -> object:
    scales = single(R, F // BLOCK), single(E, D // BLOCK, F // BLOCK)
    weight_eIO, of_tiles = codes(E, D, F).mT, tiles(usual_slots)
    return slot_mm(
        codes(R, F), weight_eIO, of_tiles, schedule=copies, cut=cut, scales=scales, columns=BLOCK,
        dtype=torch.bfloat16,
    )  # fmt: skip


def weight_grad_in_blocks() -> object:
    scales = single(R // 128, 2 * F), single(R // 128, D)
    return fp8_weight_grad(codes(2 * F, R), codes(D, R), index(E), scales[0], 128, b_scales=scales[1])


def mm_with_roles(width: int = D, *, gathers: bool, where: Tensor | None = None) -> object:
    scales = single(E, 2 * F // BLOCK, width // BLOCK)
    if gathers:
        of_rows = {"rows_R": index(R), **({} if where is None else in_arena(2 * F))}
        return block_mm(packed(S, width, BLOCK), codes(E, 2 * F, width), scales, tiles(), torch.bfloat16, **of_rows)
    row_scales_Ri = single(R, width // BLOCK)
    of_slots = codes(R, width), codes(E, 2 * F, width), scales, tiles(), torch.bfloat16
    return block_mm(*of_slots, row_scales_Ri=row_scales_Ri)


def weight_grad_of_linear(tokens: int, width_a: int, width_b: int) -> object:
    """Of a dense layer: one expert, and one tile of tokens more than there are."""
    num_tiles = tokens // BLOCK + 1
    factors = (codes(width, num_tiles * BLOCK) for width in (width_a, width_b))
    scales = (single(num_tiles, width) for width in (width_a, width_b))
    return block_weight_grad(*factors, index(1), *scales)


def mm_of_linear(tokens: int, inputs: int, outputs: int) -> object:
    """Of a dense layer: one expert, whose weight is as stored or transposed."""
    scales = single(tokens, inputs // BLOCK), single(1, outputs // BLOCK, inputs // BLOCK)
    of_tiles = plan_tiles(index(1), tokens, BLOCK)
    weight = codes(1, outputs, inputs)
    return block_mm(codes(tokens, inputs), weight, scales[1], of_tiles, torch.bfloat16, row_scales_Ri=scales[0])


def biased_expert_up(copies: TileSchedule | None, usual_slots: int | None = None) -> object:
    rows = half(S, 2880), index(R), single(R), half(E, 2, 2880, 2880), tiles(usual_slots)
    return expert_up(*rows, schedule=copies, bias=half(E, 2, 2880), activation=GPT_OSS)


def logits_of_heads(heads: int, shared: int, width: int, *limits: Any) -> Tensor:
    """`limits` are places of queries, documents, the window and the chunk."""
    q, k = (half(4, S // 4, number, width) for number in (heads, heads // shared))
    return launch_max_logits(q, k, *limits, 0.1, True)


GEMMS: dict[str, Callable[[], object]] = {
    "expert_up": lambda: expert_up(half(S, D), index(R), single(R), half(E, 2, F, D), tiles()),
    "clamped_expert_up": lambda: expert_up(
        half(S, D), index(R), single(R), half(E, 2, F, D), tiles(), activation=GPT_OSS
    ),
    "biased_expert_up": lambda: biased_expert_up(None),
    "biased_expert_up_loops_with_get": lambda: biased_expert_up(schedule(), S),
    "expert_up_with_base": lambda: expert_up(
        half(S, D), index(R), single(R), half(E, 2, F, D), tiles(), hidden=half(R, 2 * F), base=base()
    ),
    "gather_mm": lambda: gather_mm(half(S, D), index(R), half(E, D, F), tiles()),
    "gather_mm_with_base": lambda: gather_mm(half(S, D), index(R), half(E, D, F), tiles(), **in_arena(F)),
    "gather_mm_with_get_and_base": lambda: gather_mm(
        half(S, D), index(R), half(E, D, F), tiles(), schedule=schedule(), **in_arena(F)
    ),
    "gather_mm_narrow": lambda: gather_mm(half(S, D), index(R), half(E, D, 1408), tiles()),
    "expert_up_with_get": lambda: expert_up(
        half(S, D), index(R), single(R), half(E, 2, F, D), tiles(), schedule=schedule()
    ),
    "expert_up_with_get_and_base": lambda: expert_up(
        half(S, D),
        index(R),
        single(R),
        half(E, 2, F, D),
        tiles(),
        schedule=schedule(),
        hidden=half(R, 2 * F),
        base=base(),
    ),
    "expert_up_loops": lambda: expert_up(half(S, D), index(R), single(R), half(E, 2, F, D), tiles(S)),
    "expert_up_loops_with_get_and_base": lambda: expert_up(
        half(S, D),
        index(R),
        single(R),
        half(E, 2, F, D),
        tiles(S),
        schedule=schedule(),
        hidden=half(R, 2 * F),
        base=base(),
    ),
    "gather_mm_loops": lambda: gather_mm(half(S, D), index(R), half(E, D, F), tiles(S)),
    "gather_mm_narrow_loops_with_get": lambda: gather_mm(
        half(S, D), index(R), half(E, D, 1408), tiles(S), schedule=schedule()
    ),
    "slot_mm_loops": lambda: slot_mm(half(R, F), half(E, D, F).mT, tiles(S)),
    "slot_mm_loops_with_put": lambda: slot_mm(half(R, F), half(E, D, F).mT, tiles(S), schedule=schedule()),
    "slot_mm_wide_loops_with_put": lambda: slot_mm(half(R, 4 * D), half(E, 4 * D, 7168), tiles(S), schedule=schedule()),
    "gather_mm_with_get": lambda: gather_mm(half(S, D), index(R), half(E, D, F), tiles(), schedule=schedule()),
    "slot_mm_wide_with_put": lambda: slot_mm(half(R, 4 * D), half(E, 4 * D, 7168), tiles(), schedule=schedule()),
    "gather_mm_wide_with_get": lambda: gather_mm(
        half(S, 7168), index(R), half(E, 7168, D), tiles(), schedule=schedule()
    ),
    "slot_mm_down": lambda: slot_mm(half(R, F), half(E, D, F).mT, tiles()),
    "biased_slot_mm_down": lambda: slot_mm(
        half(R, 2880), half(E, 2880, 2880).mT, tiles(), bias=(single(R), half(E, 2880))
    ),
    "biased_slot_mm_down_loops_with_put": lambda: slot_mm(
        half(R, F), half(E, D, F).mT, tiles(S), schedule=schedule(), bias=(single(R), half(E, D))
    ),
    "slot_mm_up": lambda: slot_mm(half(R, 2 * F), half(E, 2 * F, D), tiles()),
    "slot_mm_down_with_put": lambda: slot_mm(half(R, F), half(E, D, F).mT, tiles(), schedule=schedule()),
    "slot_mm_up_with_put": lambda: slot_mm(half(R, 2 * F), half(E, 2 * F, D), tiles(), schedule=schedule()),
    "expert_up_with_factors": lambda: expert_up(
        half(S, D), index(R), single(R), half(E, 2, F, D), tiles(), low=(half(R, 2 * RANK), half(E, 2, F, RANK))
    ),
    "gather_mm_with_factors": lambda: gather_mm(
        half(S, D), index(R), half(E, D, F), tiles(), low=(half(R, RANK), half(E, RANK, F))
    ),
    "slot_mm_down_with_factors": lambda: slot_mm(
        half(R, F), half(E, D, F).mT, tiles(), low=(half(R, RANK), half(E, D, RANK).mT)
    ),
    "slot_mm_up_with_factors": lambda: slot_mm(
        half(R, 2 * F), half(E, 2 * F, D), tiles(), low=(half(R, 2 * RANK), half(E, 2 * RANK, D))
    ),
    "wide_expert_up_with_factors": lambda: expert_up(
        half(S, D), index(R), single(R), half(E, 2, F, D), tiles(), low=(half(R, 512), half(E, 2, F, 256))
    ),
    "wide_slot_mm_up_with_factors": lambda: slot_mm(
        half(R, 2 * F), half(E, 2 * F, D), tiles(), low=(half(R, 512), half(E, 512, D))
    ),
    "swiglu_backward_with_factors": lambda: swiglu_backward_with_factors(
        half(R, F), half(R, 2 * F), single(R), index(E), half(R, RANK), half(R, 2 * RANK)
    ),
    "wide_swiglu_backward_with_factors": lambda: swiglu_backward_with_factors(
        half(R, F), half(R, 2 * F), single(R), index(E), half(R, 256), half(R, 512), GPT_OSS
    ),
    "low_products_of_rows": lambda: low_products(half(S, D), half(E, 1, 2 * RANK, D).mT, tiles(), 2.0, rows_R=index(R)),
    "low_products_of_gradients": lambda: low_products(half(S, D), half(E, 1, D, RANK), tiles(), 2.0, rows_R=index(R)),
    "low_products_of_activations": lambda: low_products(half(R, F), half(E, 1, RANK, F).mT, tiles(), 2.0),
    "low_products_of_pairs": lambda: low_products(half(R, 2 * F), half(E, 2, F, RANK), tiles(), 2.0),
    "wide_low_products": lambda: low_products(half(S, D), half(E, 1, 512, D).mT, tiles(), 2.0, rows_R=index(R)),
    "low_weight_grads_of_rows": lambda: low_weight_grads(
        half(R, 2 * RANK), half(S, D), half(E, 1, 2 * RANK, D).mT, index(E), rows_R=index(R)
    ),
    "low_weight_grads_of_gradients": lambda: low_weight_grads(
        half(R, RANK), half(S, D), half(E, 1, D, RANK), index(E), rows_R=index(R)
    ),
    "low_weight_grads_of_activations": lambda: low_weight_grads(
        half(R, RANK), half(R, F), half(E, 1, RANK, F).mT, index(E)
    ),
    "low_weight_grads_of_pairs": lambda: low_weight_grads(
        half(R, 2 * RANK), half(R, 2 * F), half(E, 2, F, RANK), index(E)
    ),
    "wide_low_weight_grads": lambda: low_weight_grads(half(R, 512), half(R, 2 * F), half(E, 2, F, 256), index(E)),
    "expert_weight_grad_up": lambda: expert_weight_grad(half(R, 2 * F), half(S, D), index(R), index(E)),
    "expert_weight_grad_up_with_base": lambda: expert_weight_grad(
        half(R, 2 * F), half(S, D), index(R), index(E), base=base()
    ),
    "expert_weight_grad_down": lambda: expert_weight_grad(
        half(R, F), half(S, D), index(R), index(E), is_transposed=True
    ),
    "fp8_gather_mm": gather_in_fp8,
    "fp8_gather_mm_with_base": lambda: gather_in_fp8(where=base()),
    "fp8_gather_mm_with_get": lambda: gather_in_fp8(schedule()),
    "fp8_gather_mm_with_get_and_base": lambda: gather_in_fp8(schedule(), base()),
    "fp8_slot_mm": slots_in_fp8,
    "fp8_slot_mm_with_put": lambda: slots_in_fp8(schedule()),
    "fp8_weight_grad": lambda: fp8_weight_grad(codes(2 * F, R), codes(D, R), index(E), single(E), 128),
    "blockwise_gather_mm": gather_in_blocks,
    "blockwise_gather_mm_with_base": lambda: gather_in_blocks(where=base()),
    "blockwise_gather_mm_with_get": lambda: gather_in_blocks(schedule()),
    "blockwise_gather_mm_with_get_and_base": lambda: gather_in_blocks(schedule(), base()),
    "blockwise_gather_mm_wide_with_get": lambda: gather_in_blocks(schedule(), width=7168),
    "blockwise_gather_mm_narrow": lambda: gather_in_blocks(cut=NARROW_BLOCK_CUT),
    "blockwise_slot_mm_narrow": lambda: slots_in_blocks(cut=NARROW_BLOCK_CUT),
    "blockwise_slot_mm": slots_in_blocks,
    "blockwise_slot_mm_loops": lambda: slots_in_blocks(usual_slots=S),
    "blockwise_slot_mm_with_put": lambda: slots_in_blocks(schedule()),
    "blockwise_weight_grad": weight_grad_in_blocks,
    "block_mm_of_slots": lambda: mm_with_roles(gathers=False),
    "block_mm_of_rows": lambda: mm_with_roles(gathers=True),
    "block_mm_of_rows_with_base": lambda: mm_with_roles(7168, gathers=True, where=base()),
    "block_weight_grad": lambda: block_weight_grad(
        codes(2 * F, R), codes(D, R), index(E), single(R // 128, 2 * F), single(R // 128, D)
    ),
    "block_weight_grad_odd": lambda: block_weight_grad(
        codes(1408, R), codes(D, R), index(E), single(R // 128, 1408), single(R // 128, D)
    ),
    **{
        f"block_linear_{i}_to_{o}": partial(mm_of_linear, t, i, o)
        for t, i, o in ((S, 7168, 1536), (S, 1536, 24_576), (S, 512, 4096), (S - 3, 4096, 6144), (8, 2048, 128))
    },
    **{
        f"block_linear_grad_{o}_by_{i}": partial(weight_grad_of_linear, S, o, i)
        for o, i in ((1536, 7168), (24_576, 1536), (4096, 512), (128, 2048))
    },
    "max_logits": lambda: logits_of_heads(32, 8, 128, None, None, 0, 0),
    "max_logits_of_mla": lambda: logits_of_heads(16, 1, 192, None, None, 0, 0),
    "max_logits_wide": lambda: logits_of_heads(16, 2, 256, None, None, 128, 0),
    "max_logits_of_documents": lambda: logits_of_heads(
        16, 2, 128, index(S // 4).long(), index(4, S // 4).long(), 0, 1024
    ),
}
"""Kernels that are bound by the tensor cores, and must use them."""
HEAD_DIM, HEADS, KV_HEADS = 128, 32, 4


def rotary(direction: str, *, norms: bool, is_interleaved: bool, head_dim: int = HEAD_DIM) -> object:
    shape = (4, S // 4)
    qkv_BNX = half(*shape, (HEADS + 2 * KV_HEADS) * head_dim)
    weights = (half(head_dim), half(head_dim)) if norms else (None, None)
    tables = (single(S // 4, head_dim // 2), single(S // 4, head_dim // 2))
    if direction == "forward":
        return rotary_forward(qkv_BNX, *weights, *tables, KV_HEADS, head_dim, 1e-6, is_interleaved)
    grads = (half(*shape, heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return rotary_backward(*grads, qkv_BNX if norms else None, *weights, *tables, 1e-6, is_interleaved)


ROTARIES: dict[str, Callable[[], object]] = {
    f"rotary_{direction}_{kind}": partial(rotary, direction, **options)
    for direction in ("forward", "backward")
    for kind, options in {
        "halves": {"norms": True, "is_interleaved": False},
        "neighbours": {"norms": True, "is_interleaved": True},
        "no_norm": {"norms": False, "is_interleaved": False},
        "head_of_96": {"norms": True, "is_interleaved": False, "head_dim": 96},
        "head_of_8": {"norms": True, "is_interleaved": True, "head_dim": 8},
    }.items()
}


def heads_of_latents(direction: str, *, heads: int = 16, is_interleaved: bool = True) -> object:
    """Of DeepSeek-V2-Lite, with gradients as attention kernels return them, heads before positions or not."""
    batch, length, c, r, v = 4, S // 4, 128, 64, 128
    tables = single(length, r // 2), single(length, r // 2)
    if direction == "forward":
        projections = half(batch, length, heads * (c + r)), half(batch, length, heads * (c + v))
        return launch_forward(*projections, half(batch, length, 1, r), *tables, c, v, is_interleaved)
    grads = (half(batch, length, heads, width) for width in (c + r, c + r, v))
    return launch_backward(*grads, *tables, is_interleaved)


def symm_mem_arrays(num_ranks: int, width: int) -> SymmArrays:
    """The arrays of a rank, with S tokens on every rank."""
    arrays = (
        index(HEADER_WORDS + num_ranks),
        index(num_ranks, num_ranks),
        index(num_ranks, S),
        index(S, K),
        single(S, num_ranks, K),
        half(S, num_ranks, width),
    )
    peer_ptrs_P = torch.empty(num_ranks, dtype=torch.int64, device="meta")
    return SymmArrays(*(SymmArray(array, peer_ptrs_P, 256 * i) for i, array in enumerate(arrays)))


def exchange_rows(num_ranks: int, width: int, rank: int = 1) -> None:
    """All kernels of a layer's dispatch, combine and backward over symmetric memory."""
    arrays, num_local, ids_TK = symm_mem_arrays(num_ranks, width), 128 // num_ranks, index(S, K).long()
    symm_barrier(arrays.signals, rank)
    starts_Pb = exchange_counts(ids_TK, arrays, rank, num_local)
    plan = plan_rows(ids_TK, starts_Pb, arrays, rank, num_local, num_ranks * S)
    x_SD = get_rows(plan, arrays.rows, rank, num_ranks * S)
    _, scores_SK = get_assignments(plan, arrays, rank, num_local, num_ranks * S)
    put_rows(x_SD, plan, arrays.rows, rank)
    sum_partial_results(plan.sent_mask_TP, arrays.rows)
    put_scores(scores_SK, plan, arrays.scores, rank)
    pick_scores(ids_TK, plan.sent_mask_TP, arrays.scores, num_local)


def get_rows_of_a_layer(num_ranks: int, width: int, *, has_base: bool) -> None:
    plan = RowPlan(half(S, num_ranks).bool(), index(num_ranks, S), index(num_ranks + 1), index())
    out, begin = (half(S, width), base()) if has_base else (None, None)
    get_rows(plan, symm_mem_arrays(num_ranks, width).rows, 1, num_ranks * S, out=out, base=begin)


def tile_schedule(num_ranks: int) -> None:
    """The kernels of the tile schedule, and of rows without a slot."""
    arrays, slots_SK = symm_mem_arrays(num_ranks, D), index(S, K)
    sent_mask_TP = torch.empty(S, num_ranks, dtype=torch.bool, device="meta")
    plan = RowPlan(sent_mask_TP, index(num_ranks, S), index(num_ranks + 1), index())
    schedule_tiles(index(R), slots_SK, tiles(), plan, arrays.rows, arrays.rows, 1)
    clear_rows_without_slots(slots_SK, plan, arrays.rows, 1)


def exchange_clones(num_ranks: int, num_replicas: int, width: int, hidden: int) -> None:
    """All kernels that exchange clones' weights and gradients."""
    weights = half(E, 2, hidden, width), half(E, width, hidden)
    experts_Pc = torch.empty(num_ranks, num_replicas, dtype=torch.int64, device="meta")
    peer_ptrs_P = torch.empty(num_ranks, dtype=torch.int64, device="meta")
    staged = SymmArray(half(num_ranks * num_replicas, 3 * hidden * width), peer_ptrs_P, 256)
    stage_weights(weights, experts_Pc, staged, 1)
    pull_weights(weights, experts_Pc, staged, 1)
    stage_gradients([weight[:num_replicas] for weight in weights], experts_Pc, staged, 1)
    add_gradients(weights, experts_Pc, staged, 1)
    counts = SymmArray(index(num_ranks, 128), peer_ptrs_P, 256)
    send_counts(index(128), counts, 1)
    launch_plan(counts.local, num_replicas, 1)
    launch_plan(counts.local, num_replicas, 1, header=index(4))


MEMORY_BOUND: dict[str, Callable[[], object]] = {
    **{f"clones_{p}_{c}": partial(exchange_clones, p, c, D, 768) for p, c in ((8, 1), (4, 2))},
    **{f"tile_schedule_{p}_ranks": partial(tile_schedule, p) for p in (2, 8)},
    **ROTARIES,
    **{f"latent_heads_{direction}": partial(heads_of_latents, direction) for direction in ("forward", "backward")},
    **{
        f"latent_heads_{direction}_of_halves": partial(heads_of_latents, direction, heads=128, is_interleaved=False)
        for direction in ("forward", "backward")
    },
    **{
        f"symm_mem_{p}_ranks_{d}": partial(exchange_rows, p, d)
        for p, d in ((2, 4096), (8, 2048), (8, 7168), (16, 2880))
    },
    "get_rows": partial(get_rows_of_a_layer, 8, D, has_base=False),
    "get_rows_with_base": partial(get_rows_of_a_layer, 8, D, has_base=True),
    "accumulate": lambda: launch_accumulate(single(R, D), half(R, D)),
    "accumulate_first": lambda: launch_accumulate(single(R, D), half(R, D), True),
    "accumulate_many": lambda: launch_accumulate(single(2**31 + 16), half(2**31 + 16)),
    "accumulate_odd": lambda: launch_accumulate(single(3 * D + 1), half(3 * D + 1)),
    "adamw_fp32": lambda: adamw(single(R * D), single),
    "adamw_bf16_moments": lambda: adamw(single(R * D), half),
    "adamw_bf16": lambda: adamw(half(R * D), half),
    "muon_momentum": lambda: launch_momentum(single(R, D), single(R, D), half(R, D), muon_rule(True)),
    "muon_momentum_bf16": lambda: launch_momentum(single(R, D), half(R, D), half(R, D), muon_rule(False)),
    "muon_step": lambda: launch_step(single(R, D), half(R, D), 0.7, Decay(single(), single(), 0.1)),
    "symmetric_product": lambda: launch_symmetric_product(half(2, 768, D), single(2)),
    "symmetric_product_of_tall": lambda: launch_symmetric_product(half(2, D, 768).mT, single(2)),
    "polynomial": lambda: launch_symmetric_product(half(2, 768, 768), single(2), half(2, 768, 768), (2.0, -4.8, 3.4)),
    "adamw_fp8": lambda: adamw_8bit(single(R * D)),
    "adamw_fp8_bf16": lambda: adamw_8bit(half(R * D)),
    "plan_tiles": tiles,
    "counting_sort": lambda: sort_assignments(index(S, K).long(), single(S, K), E, R),
    "counting_sort_512": lambda: sort_assignments(index(S, K).long(), single(S, K), 512, R),
    "scores_of_slots": lambda: scores_of_slots(single(R), index(S, K)),
    "slot_sum": lambda: slot_sum(half(R, D), index(S, K)),
    "slot_sum_with_count": lambda: slot_sum(half(R, D), index(S, K), index(1)),
    "expert_sums": lambda: expert_sums(half(R, 2 * 2880), index(E)),
    "gathered_expert_sums": lambda: expert_sums(half(S, D), index(E), index(R), single(R)),
    "gathered_expert_sums_with_base": lambda: expert_sums(half(S, D), index(E), index(R), single(R), base()),
    "bias_scores": lambda: add_bias_scores(single(R), half(S, D), index(R), half(E, D), tiles()),
    "bias_scores_with_base": lambda: add_bias_scores(single(R), half(S, D), index(R), half(E, D), tiles(), base()),
    "slot_rows": lambda: slot_rows(half(S, D), index(R), index(E)),
    "slot_rows_with_base": lambda: slot_rows(half(S, D), index(R), index(E), base()),
    "route_qwen3": lambda: route(128, QWEN3),
    "route_forced": lambda: route(128, QWEN3, single(2, S, 8).long()),
    "route_kept": lambda: route(128, QWEN3._replace(counts_by_score=True), None, single(2, S, 8).int()),
    "route_kept_by_score": lambda: route(256, DEEPSEEK_V3._replace(counts_by_score=True), None, single(2, S, 8).int()),
    "route_unbiased_by_score": lambda: route(128, QWEN3._replace(counts_by_score=True)),
    "route_deepseek_v3": lambda: route(256, DEEPSEEK_V3),
    "route_deepseek_v2": lambda: route(160, RoutingRule("softmax", 6, 8, 3, "max", False, 16.0)),
    "route_by_score": lambda: route(256, DEEPSEEK_V3._replace(counts_by_score=True)),
    "route_mixtral": lambda: route(8, RoutingRule("softmax", 2)),
    "route_many": lambda: route(512, RoutingRule("sigmoid", 16)),
    "route_many_by_score": lambda: route(512, RoutingRule("sigmoid", 16, counts_by_score=True)),
    "route_back_qwen3": lambda: route_grad(128, QWEN3, None, None),
    "route_back_deepseek_v3": lambda: route_grad(256, DEEPSEEK_V3, single(2, 256), None),
    "route_back_mixtral": lambda: route_grad(8, RoutingRule("softmax", 2), single(2, 8), single()),
    "route_back_many": lambda: route_grad(512, RoutingRule("sigmoid", 16), single(2, 512), single()),
    "swiglu_backward": lambda: swiglu_backward(half(R, F), half(R, 2 * F), single(R), index(E)),
    "clamped_swiglu_backward": lambda: swiglu_backward(
        half(R, F), half(R, 2 * F), single(R), index(E), activation=GPT_OSS
    ),
    "swiglu_backward_with_base": lambda: swiglu_backward(
        half(R, F), half(R, 2 * F), single(R), index(E), base(), base()
    ),
    "unrouted_swiglu_backward": lambda: swiglu_backward(half(S, F), half(S, 2 * F)),
    "fp8_rows": lambda: quantize_rows(half(S, D)),
    "fp8_wide_rows": lambda: quantize_rows(half(S, 7168)),
    "fp8_unpack_rows": lambda: unpack_rows(packed(S, D), torch.bfloat16),
    "fp8_unpack_rows_with_base": lambda: unpack_rows(packed(S, D), torch.bfloat16, base=base()[:1]),
    "fp8_weights": lambda: quantize_weight(half(E, 2 * F, D), torch.bfloat16),
    "fp8_masters": lambda: quantize_weight(single(E, D, F), torch.bfloat16),
    "fp8_swiglu": lambda: fp8_swiglu.swiglu(half(R, 2 * F), single(R), index(E)),
    "clamped_fp8_swiglu": lambda: fp8_swiglu.swiglu(half(R, 2 * F), single(R), index(E), activation=GPT_OSS),
    "clamped_fp8_swiglu_backward": lambda: back_in_fp8(activation=GPT_OSS),
    "fp8_swiglu_with_base": lambda: fp8_swiglu.swiglu(half(R, 2 * F), single(R), index(E), packed(R, 2 * F), base()),
    "fp8_wide_swiglu": lambda: fp8_swiglu.swiglu(half(S, 28_672), single(S), index(E)),
    "fp8_swiglu_backward": back_in_fp8,
    "fp8_swiglu_backward_with_base": lambda: back_in_fp8(base()),
    "fp8_transposed_rows": lambda: fp8_transposed.transposed_rows(packed(S, D), index(R), tiles()),
    "fp8_transposed_rows_with_base": lambda: fp8_transposed.transposed_rows(packed(S, D), index(R), tiles(), base()),
    "fp8_transposed_slots": lambda: fp8_transposed.transposed_slots(
        codes(R, F), single(R, 2), single(E, 2), 1, tiles()
    ),
    "fp8_expert_scales": lambda: fp8_transposed.expert_scales(single(R, 2), index(E)),
    "blockwise_rows": lambda: quantize_rows(half(S, D), BLOCK),
    "blockwise_wide_rows": lambda: quantize_rows(half(S, 7168), BLOCK),
    "blockwise_unpack_rows": lambda: unpack_rows(packed(S, D, BLOCK), torch.bfloat16, columns=BLOCK),
    "blockwise_weights": lambda: quantize_weight(half(E, 2 * F, D), torch.bfloat16, BLOCK),
    "blockwise_masters": lambda: quantize_weight(single(E, D, F), torch.bfloat16, BLOCK),
    "blockwise_swiglu": lambda: fp8_swiglu.swiglu(half(R, 2 * F), single(R), index(E), columns=BLOCK),
    "blockwise_swiglu_with_base": lambda: fp8_swiglu.swiglu(
        half(R, 2 * F), single(R), index(E), packed(R, 2 * F, BLOCK), base(), columns=BLOCK
    ),
    "blockwise_wide_swiglu": lambda: fp8_swiglu.swiglu(half(S, 28_672), single(S), index(E), columns=BLOCK),
    "blockwise_swiglu_backward": lambda: back_in_fp8(columns=BLOCK),
    "blockwise_swiglu_backward_with_base": lambda: back_in_fp8(base(), BLOCK),
    "blockwise_requantized_rows": lambda: requantized_rows(packed(S, D, BLOCK), index(R), tiles()),
    "blockwise_requantized_rows_with_base": lambda: requantized_rows(packed(S, D, BLOCK), index(R), tiles(), base()),
    "blockwise_requantized_slots": lambda: requantized_slots(codes(R, F), single(R, F // BLOCK), tiles()),
    **{
        f"round_{format}_{role}_{dim}": partial(launch_rounding, half(E, S, D), format, role, dim)
        for format in ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4")
        for role, dim in (("activation", -1), ("weight", -2), ("gradient", -1))
    },
    "round_nvfp4_transformed": lambda: launch_rounding(
        half(S, D), "nvfp4", "gradient", -2, single(1, 1), is_transformed=True
    ),
    "fp8_linear_rows": lambda: quantize_apart(half(S, 18_432)),
    "fp8_block_linear_rows": lambda: quantize_apart(half(S, 18_432), BLOCK),
    "fp8_block_linear_weight": lambda: quantize_one_way(half(1, 24_576, 1536), BLOCK, transposed=False),
    "fp8_block_linear_transposed_weight": lambda: quantize_one_way(half(1, 24_576, 1536), BLOCK, transposed=True),
    "fp8_block_linear_slots": lambda: requantized_slots(
        codes(S, 18_432), single(S, 18_432 // BLOCK), plan_tiles(index(1), S, BLOCK)
    ),
    "fp8_linear_transposed_weight": lambda: quantize_one_way(half(1, 5120, D), transposed=True),
    "fp8_linear_transpose": lambda: transpose(codes(S, D)),
    "fp8_linear_transpose_with_factors": lambda: transpose(codes(S, 5120), single(S)),
    "softmax_gradient": lambda: softmax_gradient(half(2048, V), index(2048).long(), single(2048), -100),
    "softmax_gradient_fp32": lambda: softmax_gradient(single(2048, V), index(2048).long(), single(2048), -100),
    "softmax_gradient_odd": lambda: softmax_gradient(half(2048, V + 1), index(2048).long(), single(2048), -100),
    "part_statistics": lambda: part_statistics(half(2048, V // 4), index(2048).long(), V // 4),
    "part_gradient": lambda: part_gradient(
        half(2048, V // 4),
        index(2048).long(),
        single(2048),
        -100,
        statistics_P3C=single(4, 3, 2048),
        first_word=V // 4,
    ),
    "scaled_cast": lambda: scaled_cast(single(V, D), single(), torch.bfloat16),
}
"""Kernels that are bound by memory."""


@pytest.mark.parametrize("name", [*GEMMS, *MEMORY_BOUND])
def test_kernel_compiles_for_h200(name: str, hopper: list[Any]) -> None:
    (GEMMS | MEMORY_BOUND)[name]()
    assert hopper
    assert all(kernel.fits for kernel in hopper), hopper
    assert name not in GEMMS or hopper[-1].num_matrix_ops > 0


WITH_BASE = [name for name in GEMMS | MEMORY_BOUND if name.endswith("base")]


@pytest.mark.parametrize("name", WITH_BASE)
def test_a_base_on_the_device_keeps_wide_loads_and_stores(name: str, hopper: list[Any]) -> None:
    for variant in (name, name.removesuffix("_and_base").removesuffix("_with_base").replace("_loops", "")):
        (GEMMS | MEMORY_BOUND)[variant]()
    with_base, without = (hopper[i] for i in (len(hopper) // 2 - 1, -1))
    assert with_base.key != without.key
    assert (with_base.num_wide_loads, with_base.num_wide_stores) == (without.num_wide_loads, without.num_wide_stores)
    assert without.num_wide_loads + without.num_wide_stores > 0


def permute_and_multiply(num_rows: int) -> None:
    """A dropless batch in real memory: Triton specialises kernels on the alignment of addresses."""
    num_slots = 3 * num_rows
    sort_assignments(torch.zeros(num_rows, 3, dtype=torch.int64), torch.zeros(num_rows, 3), 5, num_slots)
    offsets_e = torch.zeros(5, dtype=torch.int32)
    tiles, rows_R = plan_tiles(offsets_e, num_slots, 128), torch.zeros(num_slots, dtype=torch.int32)
    dactive_RF = gather_mm(torch.zeros(num_rows, 64).bfloat16(), rows_R, torch.zeros(5, 64, 64).bfloat16(), tiles)
    hidden_R2F, scores_R = torch.zeros(num_slots, 128).bfloat16(), torch.zeros(num_slots)
    slot_sum(swiglu_backward(dactive_RF, hidden_R2F, scores_R, offsets_e)[1], torch.zeros(num_rows, 3).int())


def test_kernels_compile_once_for_any_batch_size(hopper: list[Any]) -> None:
    for num_rows in (1, 2, 170, 171, 512, 683, 1024, 1195, 1366):
        permute_and_multiply(num_rows)
    names, keys = {kernel.name for kernel in hopper}, {kernel.key for kernel in hopper}
    assert len(names) == 7
    assert len(keys) == len(names), sorted({(kernel.name, kernel.key[:8]) for kernel in hopper})


@pytest.mark.parametrize("name", ["accumulate", "accumulate_first", "accumulate_many"])
def test_accumulate_stores_16_bytes_a_thread_without_shared_memory(name: str, hopper: list[Any]) -> None:
    MEMORY_BOUND[name]()
    assert (hopper[-1].num_wide_stores, hopper[-1].shared_bytes) == (2, 0)


def test_symm_mem_rows_are_stored_16_bytes_a_thread_and_compiled_once_for_all_ranks(hopper: list[Any]) -> None:
    for rank in (0, 1, 7):
        exchange_rows(8, D, rank)
    assert len({kernel.key for kernel in hopper}) == 11
    # among the last six kernels are get, put and sum, with eight, four and two stores a thread
    assert [hopper[i].num_wide_stores for i in (-6, -4, -3)] == [8, 4, 2]
