"""All-to-all dispatcher: a row is sent once to each rank that has one of its experts.

P ranks of the group · T tokens on this rank · K experts a token · S rows received · R slots · e experts on this rank

Bytes: with 8 of 128 experts over 8 ranks a token is sent to 5.3 ranks instead of 8 times, a third fewer bytes. Its K
ids and K fp32 scores are sent too (1-2 % more). Sizes depend on the routing: ranks exchange 2·P counts, and the host
reads them once a layer, in `_read_counts`.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config.dispatchers import ALLTOALL
from titan_moe.dispatch.base import Pending, Routed, TokenDispatcher, routed
from titan_moe.dispatch.collectives import SYNC, Collectives, all_to_all
from titan_moe.dispatch.row_exchange import PendingRows, RowCopies, RowExchange, copy_rows
from titan_moe.kernels.experts.formats import COMPUTE
from titan_moe.kernels.permute.permutation import Permute, sort_by_expert


class AllToAllExchange(NamedTuple):
    """The routing, and what each rank sends and receives."""

    ids_TK: Tensor
    scores_TK: Tensor
    copies: RowCopies
    num_slots: int
    """Number of slots of this rank's experts (R), exact."""


class AllToAllDispatcher(TokenDispatcher):
    """Send rows point to point. Ranks may have different numbers of tokens, also none."""

    facts = ALLTOALL

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        permute: Permute = sort_by_expert,
        collectives: Collectives = SYNC,
        row_format: str = COMPUTE,
    ) -> None:
        """`num_experts` is the layer's total, divided among the ranks of `group`; `collectives` are synchronous or
        asynchronous; `row_format` is how rows and gradients of results are sent (`FORMATS`)."""
        super().__init__(permute)
        self.group, self.rows = group, RowExchange(group, collectives, row_format)
        self.num_ranks = group.size()
        self.num_local_experts = num_experts // group.size()
        self.first_expert = self.num_local_experts * dist.get_rank(group)

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> AllToAllExchange:
        slots_TP = count_slots(topk_ids_TK, self.num_local_experts, self.num_ranks)
        sent_mask_TP = slots_TP > 0
        rows_sent, rows_received, num_slots = self._read_counts(
            torch.stack([sent_mask_TP.sum(0), slots_TP.sum(0)], dim=1)
        )
        copies = copy_rows(sent_mask_TP, rows_sent, rows_received)
        return AllToAllExchange(topk_ids_TK, topk_scores_TK, copies, num_slots)

    def start_dispatch(self, x_TD: Tensor, exchange: AllToAllExchange) -> PendingRows:
        ids_UK = exchange.ids_TK[exchange.copies.tokens_U]
        return self.rows.start(x_TD, ids_UK, exchange.scores_TK, exchange.copies)

    def finish_dispatch(self, pending: PendingRows, exchange: AllToAllExchange) -> Routed:
        ids_SK, scores_SK = self.rows.wait_assignments(pending, exchange.copies)
        local_ids_SK = own_experts(ids_SK, self.first_expert, self.num_local_experts)
        slots = self.permute(local_ids_SK, scores_SK, self.num_local_experts, exchange.num_slots)
        return routed(self.rows.wait_rows(pending, exchange.copies), slots, exchange)

    def start_combine(self, y_SD: Tensor, exchange: AllToAllExchange) -> Pending:
        return self.rows.start_back(y_SD, exchange.copies)

    def finish_combine(self, pending: Pending, exchange: AllToAllExchange) -> Tensor:
        return self.rows.sum_back(pending, exchange.copies)

    def _read_counts(self, sent_P2: Tensor) -> tuple[list[int], list[int], int]:
        """Exchange the numbers of rows and slots between all ranks: the only host read of a layer."""
        one_each = [1] * self.num_ranks
        received_P2 = all_to_all(sent_P2, one_each, one_each, self.group)
        sent, received = torch.stack([sent_P2, received_P2]).tolist()
        return [rows for rows, _ in sent], [rows for rows, _ in received], sum(slots for _, slots in received)


def count_slots(ids_TK: Tensor, num_local_experts: int, num_ranks: int) -> Tensor:
    """The number of experts that each token has on each rank: [T, K] -> [T, P]; id -1 counts nowhere."""
    rank_TK = torch.where(ids_TK < 0, -1, ids_TK // num_local_experts)
    return (rank_TK[:, :, None] == torch.arange(num_ranks, device=ids_TK.device)).sum(1)


def own_experts(ids_TK: Tensor, first: int, number: int) -> Tensor:
    """Ids counted from the first of some experts; -1 for all others."""
    ids_TK = ids_TK - first
    return torch.where((ids_TK >= 0) & (ids_TK < number), ids_TK, -1)
