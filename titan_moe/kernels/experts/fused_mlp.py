"""The expert MLP in Triton, around grouped GEMMs.

S rows · R expert slots, sorted by expert · K choices a row · e local experts · D width of a row · F hidden width

Physics: 6·R·D·F FLOPs forward and twice that backward. Unfused, six to eight passes over R·D or R·F elements stand
beside the GEMMs, each 2-3 % of a layer. Here rows are gathered inside the GEMMs that read them, SwiGLU is the epilogue
of the first, and what remains are the two gather-sums and one pass back through SwiGLU. Kept for backward are x and
the pre-activation, 2·S·D + 4·R·F bytes in bf16; no permuted row, no activation, no expert output. After SonicMoE
(arXiv:2512.14080) and Megatron's memory-efficient permutation (arXiv:2603.07685 section 4.1.2). The reference is the
composite of expert_mlp.py.

A gather costs 4·R·D bytes, and weight gradients of rows that lie one behind the other are 6 to 20 % faster than of rows
gathered on the way: in backward of wide experts, gathering first and for a moment pays (on H200 from F = 2048 on).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.kernels.experts.composite_mlp import composite
from titan_moe.kernels.experts.gather_mm import gather_mm
from titan_moe.kernels.experts.grouped_mm import grouped_mm, grouped_mm_reference, join
from titan_moe.kernels.experts.slot_sum import slot_rows, slot_sum
from titan_moe.kernels.experts.swiglu_backward import swiglu_backward
from titan_moe.kernels.experts.tiles import plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS, expert_up
from titan_moe.kernels.experts.weight_grad import DOWN_CUT, UP_CUT, expert_weight_grad
from titan_moe.kernels.permute.rows import full_size_plan, place_scores, sample_plans
from titan_moe.kernels.registry import Benchmark, Kernel, Sample, Tunable, register

GATHERS_BEFORE_WEIGHT_GRADIENTS_FROM = 2048
"""Hidden width from which rows are gathered before the weight gradients."""


@torch.library.custom_op("titan_moe::expert_mlp", mutates_args=())
def expert_mlp_forward(
    x_SD: Tensor,
    rows_R: Tensor,
    slots_SK: Tensor,
    scores_R: Tensor,
    offsets_e: Tensor,
    gate_up_e2FD: Tensor,
    down_eDF: Tensor,
    gate_up_c2FD: Tensor | None = None,
    down_cDF: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    tiles = plan_tiles(offsets_e, rows_R.numel(), TILE_ROWS)
    weights = join(gate_up_e2FD, gate_up_c2FD)
    hidden_R2F, active_RF = expert_up(x_SD, rows_R, scores_R, weights, tiles)
    y_RD = F.grouped_mm(active_RF, join(down_eDF, down_cDF).transpose(1, 2), offs=offsets_e)
    return slot_sum(y_RD, slots_SK), hidden_R2F


@expert_mlp_forward.register_fake
def _(
    x_SD: Tensor,
    rows_R: Tensor,
    slots_SK: Tensor,
    scores_R: Tensor,
    offsets_e: Tensor,
    gate_up_e2FD: Tensor,
    down_eDF: Tensor,
    gate_up_c2FD: Tensor | None = None,
    down_cDF: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_SD), x_SD.new_empty(rows_R.shape[0], 2 * gate_up_e2FD.shape[2])


@torch.library.custom_op("titan_moe::expert_mlp_dx", mutates_args=())
def expert_mlp_backward(
    dy_SD: Tensor,
    rows_R: Tensor,
    slots_SK: Tensor,
    scores_R: Tensor,
    offsets_e: Tensor,
    gate_up_e2FD: Tensor,
    down_eDF: Tensor,
    hidden_R2F: Tensor,
    gate_up_c2FD: Tensor | None = None,
    down_cDF: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx_SD, dscores_R, and what the weight gradients need: dhidden_R2F, active_RF."""
    tiles = plan_tiles(offsets_e, rows_R.numel(), TILE_ROWS)
    dactive_RF = gather_mm(dy_SD, rows_R, join(down_eDF, down_cDF), tiles)
    dhidden_R2F, active_RF, dscores_R = swiglu_backward(dactive_RF, hidden_R2F, scores_R, offsets_e)
    dx_RD = F.grouped_mm(dhidden_R2F, join(gate_up_e2FD, gate_up_c2FD).flatten(1, 2), offs=offsets_e)
    return slot_sum(dx_RD, slots_SK), dscores_R, dhidden_R2F, active_RF


@expert_mlp_backward.register_fake
def _(
    dy_SD: Tensor,
    rows_R: Tensor,
    slots_SK: Tensor,
    scores_R: Tensor,
    offsets_e: Tensor,
    gate_up_e2FD: Tensor,
    down_eDF: Tensor,
    hidden_R2F: Tensor,
    gate_up_c2FD: Tensor | None = None,
    down_cDF: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    active_RF = hidden_R2F.new_empty(hidden_R2F.shape[0], hidden_R2F.shape[1] // 2)
    return torch.empty_like(dy_SD), torch.empty_like(scores_R), torch.empty_like(hidden_R2F), active_RF


@torch.library.custom_op("titan_moe::expert_mlp_dw", mutates_args=())
def expert_mlp_weight_grads(
    dy_SD: Tensor,
    x_SD: Tensor,
    rows_R: Tensor,
    offsets_e: Tensor,
    dhidden_R2F: Tensor,
    active_RF: Tensor,
) -> tuple[Tensor, Tensor]:
    """An operation of its own, so that a schedule may run it later."""
    return weight_grads(dy_SD, x_SD, rows_R, offsets_e, dhidden_R2F, active_RF)


def weight_grads(
    dy_SD: Tensor, x_SD: Tensor, rows_R: Tensor, offsets_e: Tensor, dhidden_R2F: Tensor, active_RF: Tensor
) -> tuple[Tensor, Tensor]:
    """Launch the gradients of gate_up [e, 2, F, D] and down [e, D, F]."""
    if active_RF.shape[1] >= GATHERS_BEFORE_WEIGHT_GRADIENTS_FROM:
        dgate_up = F.grouped_mm(dhidden_R2F.T, slot_rows(x_SD, rows_R, offsets_e), offs=offsets_e)
        ddown_eDF = F.grouped_mm(slot_rows(dy_SD, rows_R, offsets_e).T, active_RF, offs=offsets_e)
        return dgate_up.unflatten(1, (2, -1)), ddown_eDF
    dgate_up = expert_weight_grad(dhidden_R2F, x_SD, rows_R, offsets_e, cut=UP_CUT)
    ddown_eDF = expert_weight_grad(active_RF, dy_SD, rows_R, offsets_e, is_transposed=True, cut=DOWN_CUT)
    return dgate_up.unflatten(1, (2, -1)), ddown_eDF


@expert_mlp_weight_grads.register_fake
def _(
    dy_SD: Tensor,
    x_SD: Tensor,
    rows_R: Tensor,
    offsets_e: Tensor,
    dhidden_R2F: Tensor,
    active_RF: Tensor,
) -> tuple[Tensor, Tensor]:
    num_experts, hidden, width = offsets_e.shape[0], active_RF.shape[1], x_SD.shape[1]
    return x_SD.new_empty(num_experts, 2, hidden, width), x_SD.new_empty(num_experts, width, hidden)


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # or a gradient of zeros is written for the pre-activation, every time
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy_SD: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy_SD is None:
        return (None,) * 9
    x_SD, rows_R, slots_SK, scores_R, offsets_e, *own, gate_up_c2FD, down_cDF, hidden_R2F = ctx.saved_tensors
    dy_SD = dy_SD.contiguous()
    dx_SD, dscores_R, dhidden_R2F, active_RF = expert_mlp_backward(
        dy_SD, rows_R, slots_SK, scores_R, offsets_e, *own, hidden_R2F, gate_up_c2FD, down_cDF
    )
    dgate_up, ddown = expert_mlp_weight_grads(dy_SD, x_SD, rows_R, offsets_e, dhidden_R2F, active_RF)
    if gate_up_c2FD is None:
        return dx_SD, None, None, dscores_R, None, dgate_up, ddown, None, None
    sizes = [own[0].shape[0], gate_up_c2FD.shape[0]]
    (own_gate_up, gate_up), (own_down, down) = dgate_up.split(sizes), ddown.split(sizes)
    return dx_SD, None, None, dscores_R, None, own_gate_up, own_down, gate_up, down


expert_mlp_forward.register_autograd(_backward, setup_context=_save)


def _flops_of_a_pass(num_slots: int, gate_up_shape: tuple[int, int, int, int]) -> int:
    """Three products of every slot with a matrix of its expert."""
    return 6 * num_slots * gate_up_shape[2] * gate_up_shape[3]


@register_flop_formula(torch.ops.titan_moe.expert_mlp)
def _count(x_shape: Any, rows: Any, slots: Any, scores: Any, offsets: Any, gate_up: Any, *_: Any, **__: Any) -> int:
    return _flops_of_a_pass(rows[0], gate_up)


@register_flop_formula(torch.ops.titan_moe.expert_mlp_dx)
def _count_dx(dy: Any, rows: Any, slots: Any, scores: Any, offsets: Any, gate_up: Any, *_: Any, **__: Any) -> int:
    return _flops_of_a_pass(rows[0], gate_up)


@register_flop_formula(torch.ops.titan_moe.expert_mlp_dw)
def _count_dw(dy: Any, x: Any, rows: Any, offsets: Any, dhidden: Any, active: Any, *_: Any, **__: Any) -> int:
    return _flops_of_a_pass(rows[0], (0, 0, active[1], x[1]))


def fused_expert_mlp(
    x_SD: Tensor,
    rows_R: Tensor,
    slots_SK: Tensor,
    scores_R: Tensor,
    offsets_e: Tensor,
    gate_up_e2FD: Tensor,
    down_eDF: Tensor,
    gate_up_c2FD: Tensor | None = None,
    down_cDF: Tensor | None = None,
) -> Tensor:
    """The MLP in Triton: bf16 on a GPU (fp32 in the interpreter).

    Shapes: x [S, D], rows int32 [R], slots int32 [S, K], scores fp32 [R], offsets int32 [e], gate_up [e, 2, F, D],
    down [e, D, F] -> [S, D]. With c clones behind own experts, gate_up [c, 2, F, D], down [c, D, F], offsets [e + c].
    """
    # the kernels count on rows that lie one behind the other
    x_SD, scores_R = x_SD.contiguous(), scores_R.contiguous()
    gate_up_e2FD, down_eDF = gate_up_e2FD.contiguous(), down_eDF.contiguous()
    return expert_mlp_forward(
        x_SD, rows_R, slots_SK, scores_R, offsets_e, gate_up_e2FD, down_eDF, gate_up_c2FD, down_cDF
    )[0]


def _with_scores_first(expert_mlp: Any) -> Any:
    """The MLP with its differentiable arguments in front, scores as a router gives them."""

    def op(
        x_SD: Tensor,
        scores_SK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        rows_R: Tensor,
        slots_SK: Tensor,
        offsets_e: Tensor,
    ) -> Tensor:
        scores_R = place_scores(scores_SK, slots_SK, rows_R.numel())
        return expert_mlp(x_SD, rows_R, slots_SK, scores_R, offsets_e, gate_up, down)

    return op


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    samples = []
    for name, rows_R, slots_SK, offsets_e, num_experts in sample_plans(device):
        x_SD = torch.randn(slots_SK.shape[0], 64, device=device, dtype=dtype)
        scores_SK = torch.rand(slots_SK.shape, device=device)
        gate_up = torch.randn(num_experts, 2, 40, 64, device=device, dtype=dtype) / 8
        down = torch.randn(num_experts, 64, 40, device=device, dtype=dtype) / 6
        samples.append(Sample(name, (x_SD, scores_SK, gate_up, down, rows_R, slots_SK, offsets_e), 4))
    x_SD, scores_SK, gate_up, down, *plan = samples[0].args
    strided = [torch.stack([x, x], dim=-1)[..., 0] for x in (x_SD, scores_SK, gate_up, down)]
    return [*samples, Sample("strided", (*strided, *plan), 4)]


def _shape(rows: int, width: int, hidden: int, experts: int, choices: int) -> dict[str, int]:
    return {
        "rows": rows,
        "choices": choices,
        "slots": rows * choices,
        "experts": experts,
        "width": width,
        "hidden": hidden,
    }


SHAPES = {
    "qwen3": _shape(32_768, 2048, 768, 128, 8),
    "qwen3_ep8": _shape(16_384, 2048, 768, 16, 8),
    "deepseek_v2_lite": _shape(32_768, 2048, 1408, 64, 6),
    "mixtral": _shape(16_384, 4096, 14_336, 8, 2),
    "deepseek_v3_ep8": _shape(8_192, 7168, 2048, 32, 8),
}
"""Layers worth timing, as in `plan.kernel_shapes`. `ep8` is the share of one of eight ranks."""


def _draw(shape: Mapping[str, int], device: torch.device) -> Sample:
    num_rows, num_experts, width, hidden = (shape[name] for name in ("rows", "experts", "width", "hidden"))
    plan = full_size_plan(num_rows, num_experts, shape["choices"], device, shape["slots"])
    x_SD = torch.randn(num_rows, width, device=device, dtype=torch.bfloat16)
    gate_up = torch.randn(num_experts, 2, hidden, width, device=device, dtype=torch.bfloat16) / width**0.5
    down = torch.randn(num_experts, width, hidden, device=device, dtype=torch.bfloat16) / hidden**0.5
    scores_SK = torch.rand(plan[1].shape, device=device)
    return Sample("", (x_SD, scores_SK, gate_up, down, *plan), 4)


def _benchmark(name: str) -> Benchmark:
    shape = SHAPES[name]
    weights = shape["width"] * shape["hidden"]
    flops = 6.0 * shape["slots"] * weights
    # rows in and out, weights once
    moved = 2.0 * (2 * shape["rows"] * shape["width"] + 3 * shape["experts"] * weights)
    return Benchmark(name, partial(_draw, shape), flops, 3 * flops, moved, 3 * moved)


register(
    Kernel(
        "fused_expert_mlp",
        _with_scores_first(fused_expert_mlp),
        _with_scores_first(composite(grouped_mm_reference)),
        _samples,
        needs_triton=True,
        benchmarks=tuple(_benchmark(name) for name in SHAPES),
        baselines={
            "grouped_mm": _with_scores_first(composite(grouped_mm)),
            "grouped_mm, compiled": torch.compile(_with_scores_first(composite(grouped_mm)), fullgraph=True),
        },
        tunable=Tunable(
            "experts",
            {"grouped_mm": _with_scores_first(composite(grouped_mm)), "fused": _with_scores_first(fused_expert_mlp)},
            _draw,
        ),
    )
)
