"""The passes of the expert MLP in Triton, forward and backward.

S rows · R expert slots, sorted by expert · e experts that the rank computes · D width of a row · F hidden width

    pass     computes                        from
    up       pre-activation and activation   rows, gate and up
    down     results of slots                activation, down
    d_down   gradient of pre-activation      gradients of results, down; the activation again, gradients of scores
    d_up     gradients of slots              gradient of pre-activation, gate and up
    dw       gradients of weights            rows and their gradients, gradient of pre-activation, activation

Biases, if there are any, are added in the epilogues of `up` and `down`.

fused_mlp.py runs them in sequence, dispatch/symm_mem/mlp.py with communication beside the GEMMs, and
delayed_weight_grads.py delays `dw`. The pass that reads weights joins clones to own ones (weights.py).
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from titan_moe.config.swiglu import PLAIN_SWIGLU, SwiGLU
from titan_moe.kernels.experts.bias_grads import add_bias_scores, expert_sums
from titan_moe.kernels.experts.copy_blocks import TileSchedule
from titan_moe.kernels.experts.gather_mm import gather_mm
from titan_moe.kernels.experts.slot_sum import slot_rows
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.swiglu_backward import swiglu_backward
from titan_moe.kernels.experts.tiles import Tiles
from titan_moe.kernels.experts.up import expert_up
from titan_moe.kernels.experts.weight_grad import DOWN_CUT, UP_CUT, expert_weight_grad
from titan_moe.kernels.experts.weights import ExpertWeights

GATHERS_BEFORE_WEIGHT_GRADIENTS_FROM = 2048
"""Hidden width from which rows are gathered before the weight gradients: the gather costs 4·R·D bytes, and weight
gradients of contiguous rows are faster (tools/results)."""

SlotGemm = Callable[..., Tensor]
"""x_RI, weight_eIO (contiguous, or the transpose of what is), offs=offsets_e -> [R, O]."""


def up(
    x_SD: Tensor,
    slots: ExpertSlots,
    weights: ExpertWeights,
    tiles: Tiles,
    schedule: TileSchedule | None = None,
    hidden: Tensor | None = None,
    base: Tensor | None = None,
    activation: SwiGLU = PLAIN_SWIGLU,
) -> tuple[Tensor, Tensor]:
    """Pre-activation [R, 2F] and weighted activation [R, F]. With `schedule`, the launch gets rows into x.

    With `base`, rows and the pre-activation, written into `hidden`, are those of several layers.
    """
    operands = x_SD, slots.rows_R, slots.scores_R, weights.gate_up.join(), tiles
    bias = None if weights.gate_up_bias is None else weights.gate_up_bias.join()
    return expert_up(*operands, schedule=schedule, bias=bias, hidden=hidden, base=base, activation=activation)


def down(active_RF: Tensor, slots: ExpertSlots, weights: ExpertWeights, gemm: SlotGemm = F.grouped_mm) -> Tensor:
    """Results of slots, [R, D]. The GEMM adds the bias, if there is one."""
    return gemm(active_RF, weights.down.join().transpose(1, 2), offs=slots.offsets_e)


def d_down(
    dy_SD: Tensor,
    slots: ExpertSlots,
    weights: ExpertWeights,
    hidden_R2F: Tensor,
    tiles: Tiles,
    schedule: TileSchedule | None = None,
    base: Tensor | None = None,
    dactive_RF: Tensor | None = None,
    delayed: Tensor | None = None,
    activation: SwiGLU = PLAIN_SWIGLU,
) -> tuple[Tensor, Tensor, Tensor]:
    """dhidden [R, 2F], weighted activation [R, F], dscores [R]. With `schedule`, the launch gets rows into dy.

    Gradients of activations are written into `dactive_RF`, if it is given, for `delayed_dw`. With `base`, the
    pre-activation is that of several layers. With `delayed`, dy and dactive_RF are.
    """
    down = weights.down.join()
    dactive_RF = gather_mm(
        dy_SD, slots.rows_R, down, tiles, schedule=schedule, base=delayed, out=dactive_RF, out_base=delayed
    )
    grads = swiglu_backward(dactive_RF, hidden_R2F, slots.scores_R, slots.offsets_e, base, delayed, activation)
    if weights.down_bias is not None:
        add_bias_scores(grads[2], dy_SD, slots.rows_R, weights.down_bias.join(), tiles, delayed)
    return grads


def d_up(dhidden_R2F: Tensor, slots: ExpertSlots, weights: ExpertWeights, gemm: SlotGemm = F.grouped_mm) -> Tensor:
    """Gradients of slots, [R, D]."""
    return gemm(dhidden_R2F, weights.gate_up.join().flatten(1, 2), offs=slots.offsets_e)


def dw(
    dy_SD: Tensor,
    x_SD: Tensor,
    slots: ExpertSlots,
    dhidden_R2F: Tensor,
    active_RF: Tensor,
    base: Tensor | None = None,
    delayed: Tensor | None = None,
    *,
    has_bias: bool = False,
) -> list[Tensor]:
    """Gradients of gate_up [e, 2, F, D] and down [e, D, F], and of their biases, in one piece.

    With `base`, x_SD is that of several layers; with `delayed`, dy_SD is.
    """
    rows_R, _, scores_R, offsets_e = slots
    if active_RF.shape[1] >= GATHERS_BEFORE_WEIGHT_GRADIENTS_FROM:
        dgate_up = F.grouped_mm(dhidden_R2F.T, slot_rows(x_SD, rows_R, offsets_e, base), offs=offsets_e)
        ddown_eDF = F.grouped_mm(slot_rows(dy_SD, rows_R, offsets_e, delayed).T, active_RF, offs=offsets_e)
    else:
        dgate_up = expert_weight_grad(dhidden_R2F, x_SD, rows_R, offsets_e, cut=UP_CUT, base=base)
        ddown_eDF = expert_weight_grad(
            active_RF, dy_SD, rows_R, offsets_e, is_transposed=True, cut=DOWN_CUT, base=delayed
        )
    grads = [dgate_up.unflatten(1, (2, -1)), ddown_eDF]
    if has_bias:
        dgate_up_bias = expert_sums(dhidden_R2F, offsets_e).unflatten(1, (2, -1))
        grads += [dgate_up_bias, expert_sums(dy_SD, offsets_e, rows_R, scores_R, delayed)]
    return grads


def delayed_dw(
    dy_SD: Tensor,
    x_SD: Tensor,
    slots: ExpertSlots,
    dactive_RF: Tensor,
    hidden_R2F: Tensor,
    base: Tensor | None = None,
    delayed: Tensor | None = None,
    activation: SwiGLU = PLAIN_SWIGLU,
    *,
    has_bias: bool = False,
) -> list[Tensor]:
    """`dw` a while after `d_down`: gradients of pre-activations and activations are computed again.

    Kept are one F a slot instead of three, for a pass over 6·R·F elements. With `base`, x_SD and hidden_R2F are those
    of several layers; with `delayed`, dy_SD and dactive_RF are.
    """
    of_slots = slots.scores_R, slots.offsets_e
    dhidden_R2F, active_RF, _ = swiglu_backward(dactive_RF, hidden_R2F, *of_slots, base, delayed, activation)
    return dw(dy_SD, x_SD, slots, dhidden_R2F, active_RF, base, delayed, has_bias=has_bias)


def flops_of_a_pass(num_slots: int, gate_up_shape: tuple[int, int, int, int]) -> int:
    """Three products of every slot with a matrix of its expert: `up` and `down`, `d_down` and `d_up`, or `dw`."""
    _, both, hidden, width = gate_up_shape
    return 2 * num_slots * (both + 1) * hidden * width
