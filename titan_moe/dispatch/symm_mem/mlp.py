"""The expert MLP between two exchanges over symmetric memory, as one operation each way.

P ranks of the group · T tokens on each of them · K choices · S rows that a rank has room for · R expert slots ·
e experts on this rank · D width · W elements of a row as it is sent

Forward gets the rows that are routed to this rank, computes their slots and puts each row's sum; backward
(backward.py) does so with gradients. Each is two whole exchanges, barriers included, on the current stream:
nothing is pending when it returns.

What backward needs of the rows lies in an arena (kernels/experts/arena.py), where there is one. If the arena does not
keep it, backward first gets the rows and computes the hidden states again, which every rank does alike.

Operations take named tuples as lists of their tensors.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_moe.dispatch.symm_mem.dispatcher import known_plan
from titan_moe.kernels.experts.arena import NONE, Arena
from titan_moe.kernels.experts.format import ExpertFormat, Passes, Work
from titan_moe.kernels.experts.formats import FORMATS
from titan_moe.kernels.experts.fused_mlp import Keep
from titan_moe.kernels.experts.passes import flops_of_a_pass
from titan_moe.kernels.experts.slot_sum import slot_sum
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.tiles import plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS
from titan_moe.kernels.experts.weights import Tensors
from titan_moe.kernels.permute.counting_sort import sort_assignments
from titan_moe.kernels.symm_mem.arrays import SymmArray, SymmArrays, narrower, symm_arrays
from titan_moe.kernels.symm_mem.assignments import get_assignments, own_scores
from titan_moe.kernels.symm_mem.barrier import symm_barrier
from titan_moe.kernels.symm_mem.row_plan import RowPlan
from titan_moe.kernels.symm_mem.rows import get_rows, own_rows, put_rows, sum_partial_results
from titan_moe.kernels.symm_mem.tile_schedule import clear_rows_without_slots, schedule_tiles
from titan_moe.plan.cost.loads import visit_probability

NUM_OF_PLAN, NUM_OF_KEPT = 4, 7
"""Tensors of a plan, and of what forward keeps for backward: rows, hidden states, base, and slots."""
MAX_SLOTS_PER_ROW_OVERLAPPED = 3.0
"""Up to so many on average, sums are put beside the last GEMM. With more, few rows are done before its end, and all
multiprocessors sum faster afterwards."""


class Sizes(NamedTuple):
    """Numbers known on the host."""

    num_local_experts: int
    max_rows: int
    num_slots: int
    usual_slots: int
    """Slots of a balanced load and some more: launches have thread blocks for these."""
    arena: int
    """Handle of the arena of what backward needs; without one, autograd keeps it."""
    overlaps: int
    """1 if copy blocks get and put rows beside the GEMMs, 0 if rows are got before and put after them."""
    keeps: int = Keep.ALL
    """`Keep`: without rows, backward gets them again; without hidden states, it computes these again."""
    delay: int = 0
    """Handle of the `DelayedWeightGrads` that take over weight gradients, which backward computes otherwise; weights
    have no clones then, and the arena, if there is one, can delay."""

    @property
    def uses_arena(self) -> bool:
        """Whether the rows of this layer lie in the arena."""
        return self.arena != NONE and self.keeps > Keep.NOTHING

    def kept_in(self) -> Arena | None:
        """The arena of the rows, if they lie in one."""
        return Arena.of(self.arena) if self.uses_arena else None

    def num_returned(self) -> tuple[int, int]:
        """Rows and hidden states that forward returns for backward."""
        if self.uses_arena or self.keeps == Keep.NOTHING:
            return 0, 0
        return self.max_rows, self.num_slots if self.keeps == Keep.ALL else 0


class Kept(NamedTuple):
    """What backward needs of the rows."""

    x_SW: Tensor  # in an arena its rows
    hidden: Tensor  # in an arena its hidden states
    base: Tensor | None  # in an arena int64 [4], as `Arena.take` returns it


class Peers(NamedTuple):
    """This rank's part of an exchange."""

    plan: RowPlan
    arrays: SymmArrays
    sent: SymmArray
    """`arrays.rows` for rows as they are sent."""
    rank: int
    ids_TK: Tensor
    format: ExpertFormat
    sizes: Sizes

    def barrier(self) -> None:
        symm_barrier(self.arrays.signals, self.rank)

    def offer(self, x_TW: Tensor) -> None:
        """Put this rank's rows where peers get them; the write phase of a get, without barriers."""
        own_rows(self.sent).copy_(x_TW)

    def schedule(self, slots: ExpertSlots) -> Work:
        """The order of tiles and rows in both GEMMs: an expert's tiles begin where its rows are this rank's own."""
        rows_R, slots_SK, _, offsets_e = slots
        turns = self.arrays.rows.peer_ptrs_P.numel()
        tiles = plan_tiles(offsets_e, rows_R.numel(), TILE_ROWS, self.rank, turns, self.sizes.usual_slots)
        if not self.sizes.overlaps:
            return Work(slots, tiles)
        schedule = schedule_tiles(rows_R, slots_SK, tiles, self.plan, self.sent, self.arrays.rows, self.rank)
        return Work(slots, tiles, schedule)

    def new_hidden(self, num_features: int) -> Tensor:
        """Memory for the hidden states of one layer."""
        return self.format.new_hidden(self.sent.local, self.sizes.num_slots, num_features)

    def up(self, passes: Passes, num_features: int, work: Work, place: Kept | None) -> tuple[Kept, Any]:
        """Get the rows, and compute hidden states and weighted activations of their slots, the former two in `place`;
        without it in new tensors."""
        like, max_rows = self.sent.local, self.sizes.max_rows
        if place is None:
            place = Kept(like.new_empty(max_rows, like.shape[2]), self.new_hidden(num_features), None)
        x_SW, hidden, base = place
        if work.schedule is None:
            get_rows(self.plan, self.sent, self.rank, max_rows, out=x_SW, base=base)
        return place, passes.up(x_SW, work, hidden, base)

    def overlaps_put(self) -> bool:
        """Whether sums are put beside the GEMM, by the expected number of slots of a row under random routing."""
        num_ranks, num_choices = self.plan.sent_mask_TP.shape[1], self.ids_TK.shape[1]
        num_local_experts = self.sizes.num_local_experts
        visits = num_ranks * visit_probability(num_ranks * num_local_experts, num_local_experts, num_choices)
        return num_choices <= MAX_SLOTS_PER_ROW_OVERLAPPED * visits

    def put_sums(self, compute: Callable[..., Tensor], work: Work) -> None:
        """Run a pass that computes slots, and put each row's sum of them, beside its GEMM or after it."""
        slots, tiles, schedule = work
        if schedule is None or not self.overlaps_put():
            y_RD = compute(Work(slots, tiles), in_triton=schedule is not None)
            sums_SD = slot_sum(y_RD, slots.slots_SK, self.plan.recv_offsets_Q[-1:])
            put_rows(sums_SD, self.plan, self.arrays.rows, self.rank)
            return
        compute(work, in_triton=True)
        num_rows, num_choices = slots.slots_SK.shape
        if slots.rows_R.numel() < num_rows * min(num_choices, self.sizes.num_local_experts):
            # a row may have overflowed: its step is skipped, but its result must be finite
            clear_rows_without_slots(slots.slots_SK, self.plan, self.arrays.rows, self.rank)


def peers_of(
    plan: Tensors, memory: Tensor, peer_ptrs_P: Tensor, rank: int, format: ExpertFormat, sizes: Sizes, like_TD: Tensor
) -> Peers:
    """View the arrays, whose layout is the same for a layer's rows and its gradients."""
    ids_TK, *of_rows = plan
    (num_tokens, width), num_choices = like_TD.shape, ids_TK.shape[1]
    scores = torch.promote_types(like_TD.dtype, torch.float32)
    arrays = symm_arrays(memory, peer_ptrs_P, num_tokens, width, num_choices, like_TD.dtype, scores)
    sent = narrower(arrays.rows, format.row_width(width, like_TD.dtype))
    return Peers(known_plan(*of_rows), arrays, sent, rank, ids_TK, format, sizes)


@torch.library.custom_op("titan_moe::expert_mlp_over_symm_mem", mutates_args=())
def forward(
    x_TD: Tensor, scores_TK: Tensor, plan: Tensors, weights: Tensors,
    memory: Tensor, peer_ptrs_P: Tensor, rank: int, format: str, sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Results, whether slots overflowed, and what backward needs: rows, hidden states, base, and slots.

    With an arena rows and hidden states are empty, and base is int64 [4]. `plan` is ids_TK and the first three of a
    `RowPlan`, `weights` are `ExpertFormat.operands`, `sizes` are `Sizes`.
    """
    of, passes, num_features = Sizes(*sizes), FORMATS[format].passes(weights), weights[1].shape[2]
    peers = peers_of(plan, memory, peer_ptrs_P, rank, FORMATS[format], of, x_TD)
    x_TW = peers.format.pack(x_TD)
    peers.barrier()
    peers.offer(x_TW)
    peers.arrays.ids.local.copy_(peers.ids_TK)
    own_scores(peers.arrays.scores).copy_(scores_TK)
    peers.barrier()
    ids_SK, scores_SK = get_assignments(peers.plan, peers.arrays, rank, of.num_local_experts, of.max_rows)
    *of_slots, overflowed = sort_assignments(ids_SK, scores_SK, of.num_local_experts, of.num_slots)
    slots = ExpertSlots(*of_slots)
    work = peers.schedule(slots)
    arena, place = of.kept_in(), None
    if arena is not None:
        base = arena.take(peers.plan.recv_offsets_Q[-1:], slots.offsets_e[-1:], keeps_slots=of.keeps == Keep.ALL)
        hidden = arena.hidden_BH if of.keeps == Keep.ALL else peers.new_hidden(num_features)
        place = Kept(arena.rows_AW, hidden, base)
    (x_SW, hidden, _), active = peers.up(passes, num_features, work, place)
    peers.barrier()
    peers.put_sums(partial(passes.down, active), work)
    peers.barrier()
    y_TD = sum_partial_results(peers.plan.sent_mask_TP, peers.arrays.rows)
    if arena is None:
        base = slots.offsets_e.new_empty(0, dtype=torch.int64)
    num_rows, num_hidden = of.num_returned()
    x_SW = x_SW if num_rows else x_SW.new_empty(0, x_SW.shape[1])
    hidden = hidden if num_hidden else hidden.new_empty(0, hidden.shape[1])
    return y_TD, overflowed, x_SW, hidden, base, *slots


@forward.register_fake
def _(x_TD: Tensor, scores_TK: Tensor, plan: Any, weights: Tensors, *rest: Any) -> tuple[Tensor, ...]:
    def index(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return x_TD.new_empty(shape, dtype=dtype)

    format, of = FORMATS[rest[-2]], Sizes(*rest[-1])
    num_rows, num_hidden = of.num_returned()
    x_SW = x_TD.new_empty(num_rows, format.row_width(x_TD.shape[1], x_TD.dtype))
    hidden = format.new_hidden(x_TD, num_hidden, weights[1].shape[2])
    base = index(4 if of.uses_arena else 0, dtype=torch.int64)
    slots = (index(of.num_slots), index(of.max_rows, scores_TK.shape[1]), scores_TK.new_empty(of.num_slots))
    return x_TD.new_empty(x_TD.shape), index(), x_SW, hidden, base, *slots, index(of.num_local_experts)


@register_flop_formula(torch.ops.titan_moe.expert_mlp_over_symm_mem)
def _count(x: Any, scores: Any, plan: Any, weights: Any, *rest: Any, **_: Any) -> int:
    return flops_of_a_pass(Sizes(*rest[-1]).num_slots, weights[0])
