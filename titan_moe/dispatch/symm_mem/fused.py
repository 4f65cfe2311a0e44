"""Symmetric-memory dispatcher with fused communication: the experts get their rows and put their results.

P ranks of the group · T tokens on each of them · K choices · S rows that a rank has room for · R expert slots ·
e experts on this rank · D width

The dispatcher hands the experts this rank's own rows and the plan of the exchange; the experts' MLP and both exchanges
are one operation (mlp.py). With overlap, thread blocks of the experts' first GEMM get rows in the order in
which its tiles need them, and sums of the last GEMM are put as soon as their slots are done, or after it if rows have
many slots. Backward gets gradients of results and puts those of rows beside its two GEMMs in the same way. Exposed are
the plan, the assignments, the first tiles' rows and the last tiles' sums. After COMET, arXiv:2502.19811, and FlashDMoE,
arXiv:2506.04667, where thread blocks of one kernel do both kinds of work.

Results are bit for bit those of `SymmMemDispatcher` and the fused experts, except for GEMMs whose sums are put beside
them: these are Triton's, which can signal completion, the others PyTorch's. (In fp8 all are Triton's.)

Used alone, with memory and calls as in symm_mem.py:

    experts = GroupedExperts(num_local_experts, width, hidden, choose_expert_mlp("fused", "activation"))
    dispatcher = SymmMemFusedDispatcher(num_experts, memory)
    inputs = dispatcher.dispatch(x_TD, topk_ids_TK, topk_scores_TK)
    y_TD = dispatcher.combine(experts(inputs), inputs)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.dispatch.base import Exchange, ExpertInputs, Pending
from titan_moe.dispatch.symm_mem.backward import run_mlp
from titan_moe.dispatch.symm_mem.dispatcher import SymmMemDispatcher, SymmMemExchange, symm_plan
from titan_moe.dispatch.symm_mem.memory import SymmMemory
from titan_moe.dispatch.symm_mem.mlp import Sizes
from titan_moe.kernels.experts.arena import Arena
from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.kernels.experts.fused_mlp import FusedMLP, Keep
from titan_moe.kernels.experts.weights import ExpertWeights, Tensors
from titan_moe.kernels.symm_mem.row_plan import RowPlan

NOT_FUSED = 'experts get their rows only where they are fused; take perf.kernels = "fused"'
USUAL_LOAD = 1.25
"""Slots over the balanced load for which launches have a thread block each; those of more slots take turns."""


class CombinedOutput(NamedTuple):
    """Results on the ranks of their tokens."""

    y_TD: Tensor
    overflowed: Tensor
    """int32 scalar, 1 if slots overflowed."""
    offsets_e: Tensor
    """int32, running ends of each local expert's slots."""


class PeerTokens(NamedTuple):
    """`ExpertInputs` before rows are exchanged: this rank's own, which peers will get."""

    x_TD: Tensor
    sent: SymmMemExchange
    memory: SymmMemory
    of: Sizes
    exchange: Exchange

    @property
    def rows(self) -> Tensor:
        return self.x_TD

    @property
    def sizes(self) -> tuple[int, int]:
        return self.x_TD.shape[0], self.of.num_slots

    def run_mlp(self, mlp: ExpertMLP, rows: Tensor, weights: ExpertWeights) -> CombinedOutput:
        """Get rows, compute their slots, and combine the results.

        Raises: ValueError for experts with another MLP than the fused ones.
        """
        if not isinstance(mlp, FusedMLP):
            raise ValueError(NOT_FUSED)
        of = self.of._replace(keeps=int(mlp.keeps))
        if mlp.queue is not None and mlp.keeps is Keep.ALL:
            arena = Arena.of(self.of.arena)
            if arena is None or arena.can_delay:  # else backward gets the rows of one layer after the other again
                weights, delay = mlp.delay(weights)
                of = of if delay is None else of._replace(delay=delay.handle)
        return _run(mlp, rows, self.sent, mlp.format.operands(weights), self.memory, of)

    def with_exchange(self, exchange: Exchange) -> "PeerTokens":
        return self._replace(exchange=exchange)


class PeerPieces(NamedTuple):
    """The same in pieces, each with exchanges of its own, one after the other. All ranks have the same pieces."""

    x_TD: Tensor
    sent: tuple[SymmMemExchange, ...]
    memory: SymmMemory
    of: tuple[Sizes, ...]
    exchange: Exchange

    @property
    def rows(self) -> Tensor:
        return self.x_TD

    @property
    def sizes(self) -> tuple[int, int]:
        return self.x_TD.shape[0], self.of[0].num_slots

    def run_mlp(self, mlp: ExpertMLP, rows: Tensor, weights: ExpertWeights) -> CombinedOutput:
        """As that of `PeerTokens`. No weight gradients are delayed: the arena keeps nothing.

        Raises: ValueError for experts with another MLP than the fused ones; RuntimeError under a compiler, which may
        change the order of pieces.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError("layers in pieces are not compiled: ranks must run their exchanges in the same order")
        if not isinstance(mlp, FusedMLP):
            raise ValueError(NOT_FUSED)
        operands, outputs = mlp.format.operands(weights), []
        of_pieces = rows.split([len(sent.ids_TK) for sent in self.sent])
        for rows_of_piece, sent, of in zip(of_pieces, self.sent, self.of, strict=True):
            outputs.append(_run(mlp, rows_of_piece, sent, operands, self.memory, of._replace(keeps=int(mlp.keeps))))
        y, overflowed, offsets = zip(*outputs, strict=True)
        return CombinedOutput(torch.cat(y), torch.stack(overflowed).amax(), torch.stack(offsets).sum(0))

    def with_exchange(self, exchange: Exchange) -> "PeerPieces":
        return self._replace(exchange=exchange)


def _run(
    mlp: FusedMLP, rows: Tensor, sent: SymmMemExchange, operands: Tensors, memory: SymmMemory, of: Sizes
) -> CombinedOutput:
    ids_TK, scores_TK, plan, _ = sent
    return CombinedOutput(*run_mlp(rows, scores_TK, [ids_TK, *plan[:3]], operands, *memory, mlp.format.name, [*of]))


class SymmMemFusedDispatcher(SymmMemDispatcher):
    """The experts get rows and put results; while the bound of each layer of an arena is lifted, in pieces. Without an
    arena, a step that is repeated at sizes that the host reads runs as in the parent."""

    def __init__(self, *args: Any, overlaps: bool = True, **options: Any) -> None:
        """Arguments are the parent's. `overlaps`: copy blocks of the experts' GEMMs move rows; without it, rows are
        moved before and after."""
        super().__init__(*args, **options)
        self.overlaps = overlaps

    def start_dispatch(self, x_TD: Tensor, exchange: SymmMemExchange) -> Pending:
        return super().start_dispatch(x_TD, exchange) if self.capacity.reads_sizes_on_host else x_TD

    def finish_dispatch(self, sent: Pending, exchange: SymmMemExchange) -> ExpertInputs:
        if self.capacity.reads_sizes_on_host:
            return super().finish_dispatch(sent, exchange)
        self.record_rows(exchange)
        ids_TK, max_rows = exchange.ids_TK, exchange.max_rows
        num_tokens, worst = len(ids_TK), self._worst_slots(ids_TK, max_rows)
        rows, slots = (self.expected_rows(ids_TK), max_rows), (ids_TK.numel(), worst)
        at_a_time = self.capacity.tokens_at_a_time(num_tokens, rows, slots)
        if at_a_time == num_tokens:
            num_slots = self.capacity.num_slots(ids_TK, balanced=ids_TK.numel(), worst=worst)
            return PeerTokens(sent, exchange, self.memory, self._sizes(ids_TK, max_rows, num_slots), exchange)
        tensors = zip(ids_TK.split(at_a_time), exchange.scores_TK.split(at_a_time), strict=True)
        pieces = tuple(self._piece(*of_piece) for of_piece in tensors)
        sizes = (self._sizes(it.ids_TK, it.max_rows, self._worst_slots(it.ids_TK, it.max_rows)) for it in pieces)
        return PeerPieces(sent, pieces, self.memory, tuple(sizes), exchange)

    def _piece(self, ids_TK: Tensor, scores_TK: Tensor) -> SymmMemExchange:
        """The exchange of a part of the tokens, with room for the worst case."""
        max_rows = self.num_ranks * len(ids_TK)
        plan = RowPlan(*symm_plan(ids_TK, *self.memory, self.num_local_experts, max_rows))
        return SymmMemExchange(ids_TK, scores_TK, plan, max_rows)

    def _worst_slots(self, ids_TK: Tensor, max_rows: int) -> int:
        return max_rows * min(ids_TK.shape[1], self.num_local_experts)

    def _sizes(self, ids_TK: Tensor, max_rows: int, num_slots: int) -> Sizes:
        usual, handle = min(num_slots, int(ids_TK.numel() * USUAL_LOAD)), self.capacity.arena_handle
        return Sizes(self.num_local_experts, max_rows, num_slots, usual, handle, int(self.overlaps))

    def start_combine(self, y: Any, exchange: SymmMemExchange) -> Pending:
        if not isinstance(y, CombinedOutput):
            return super().start_combine(y, exchange)
        self.capacity.record_load(y.offsets_e[-1], exchange.ids_TK.numel(), y.overflowed)
        return y.y_TD
