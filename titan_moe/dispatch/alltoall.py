"""All-to-all dispatcher: a row is sent once to each rank that has one of its experts.

P ranks of the group · T tokens on this rank · K experts a token · U rows sent · S rows received · R slots
e experts on this rank

Bytes: with 8 of 128 experts over 8 ranks a token is sent to 5.3 ranks instead of 8 times, a third fewer bytes. Its K
ids and K fp32 scores are sent too (1-2 % more). Sizes depend on the routing: ranks exchange 2·P counts, and the host
reads them once a layer, in `_read_counts`. The collectives of ids and scores start before that of the rows, so that
assignments can be permuted while rows are sent.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config.dispatchers import ALLTOALL
from titan_moe.dispatch.base import Pending, Routed, TokenDispatcher, routed
from titan_moe.dispatch.collectives import SYNC, Collectives, all_to_all
from titan_moe.dispatch.row_format import PLAIN
from titan_moe.kernels.permute.permutation import Permutation, Permute, sort_by_expert
from titan_moe.kernels.permute.rows import gather_rows, sum_slots


class AllToAllExchange(NamedTuple):
    """What each rank sends and receives. Copies are the rows that this rank sends, by destination, then by token."""

    ids_TK: Tensor
    scores_TK: Tensor
    tokens_U: Tensor
    """int32, copy -> token."""
    copies_TP: Tensor
    """int32, token -> its copy for each destination rank, -1 for none."""
    rows_sent: list[int]
    """Number of copies for each rank."""
    rows_received: list[int]
    """Number of rows from each rank; their sum is S."""
    num_slots: int
    """Number of slots of this rank's experts (R), exact."""


class PendingDispatch(NamedTuple):
    """The pending all-to-alls of a dispatch."""

    ids_SK: Pending
    scores_SK: Pending
    x_SD: Pending


class AllToAllDispatcher(TokenDispatcher):
    """Send rows point to point. Ranks may have different numbers of tokens, also none."""

    facts = ALLTOALL

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        permute: Permute = sort_by_expert,
        collectives: Collectives = SYNC,
        row_format: str = PLAIN,
    ) -> None:
        """`num_experts` is the layer's total, divided among the ranks of `group`; `collectives` are synchronous or
        asynchronous; `row_format` is how rows and gradients of results are sent (row_format.py)."""
        super().__init__(permute)
        self.group, self.collectives, self.row_format = group, collectives, row_format
        self.num_ranks = group.size()
        self.num_local_experts = num_experts // group.size()
        self.first_expert = self.num_local_experts * dist.get_rank(group)

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> AllToAllExchange:
        rank_TK = torch.where(topk_ids_TK < 0, -1, topk_ids_TK // self.num_local_experts)
        slots_TP = (rank_TK[:, :, None] == torch.arange(self.num_ranks, device=rank_TK.device)).sum(1)
        sent_mask_TP = slots_TP > 0
        rows_sent, rows_received, num_slots = self._read_counts(
            torch.stack([sent_mask_TP.sum(0), slots_TP.sum(0)], dim=1)
        )
        copies_TP, tokens_U = _number_copies(sent_mask_TP, sum(rows_sent))
        return AllToAllExchange(topk_ids_TK, topk_scores_TK, tokens_U, copies_TP, rows_sent, rows_received, num_slots)

    def start_dispatch(self, x_TD: Tensor, exchange: AllToAllExchange) -> PendingDispatch:
        start, splits = self.collectives.all_to_all.start, self._splits(exchange)
        ids_SK = start(exchange.ids_TK[exchange.tokens_U].int(), *splits)
        scores_SK = start(gather_rows(exchange.scores_TK, exchange.tokens_U, exchange.copies_TP), *splits)
        x_SD = start(gather_rows(x_TD, exchange.tokens_U, exchange.copies_TP), *splits, self.row_format, PLAIN)
        return PendingDispatch(ids_SK, scores_SK, x_SD)

    def finish_dispatch(self, pending: PendingDispatch, exchange: AllToAllExchange) -> Routed:
        wait, splits = self.collectives.all_to_all.wait, self._splits(exchange)
        slots = self._permute(wait(pending.ids_SK, *splits), wait(pending.scores_SK, *splits), exchange.num_slots)
        return routed(wait(pending.x_SD, *splits, self.row_format, PLAIN), slots, exchange)

    def start_combine(self, y_SD: Tensor, exchange: AllToAllExchange) -> Pending:
        return self.collectives.all_to_all.start(y_SD, *self._splits_of_results(exchange), PLAIN, self.row_format)

    def finish_combine(self, pending: Pending, exchange: AllToAllExchange) -> Tensor:
        y_UD = self.collectives.all_to_all.wait(pending, *self._splits_of_results(exchange), PLAIN, self.row_format)
        return sum_slots(y_UD, exchange.tokens_U, exchange.copies_TP)

    def _splits(self, exchange: AllToAllExchange) -> tuple[list[int], list[int], dist.ProcessGroup]:
        return exchange.rows_received, exchange.rows_sent, self.group

    def _splits_of_results(self, exchange: AllToAllExchange) -> tuple[list[int], list[int], dist.ProcessGroup]:
        return exchange.rows_sent, exchange.rows_received, self.group

    def _permute(self, ids_SK: Tensor, scores_SK: Tensor, num_slots: int) -> Permutation:
        ids_SK = ids_SK - self.first_expert
        local_ids_SK = torch.where((ids_SK >= 0) & (ids_SK < self.num_local_experts), ids_SK, -1)
        return self.permute(local_ids_SK, scores_SK, self.num_local_experts, num_slots)

    def _read_counts(self, sent_P2: Tensor) -> tuple[list[int], list[int], int]:
        """Exchange the numbers of rows and slots between all ranks: the only host read of a layer."""
        one_each = [1] * self.num_ranks
        received_P2 = all_to_all(sent_P2, one_each, one_each, self.group)
        sent, received = torch.stack([sent_P2, received_P2]).tolist()
        return [rows for rows, _ in sent], [rows for rows, _ in received], sum(slots for _, slots in received)


def _number_copies(sent_mask_TP: Tensor, num_copies: int) -> tuple[Tensor, Tensor]:
    """Number the (rank, token) pairs that are sent, rank by rank: -> copies_TP (-1 for none) and tokens_U."""
    num_tokens, num_ranks = sent_mask_TP.shape
    sent_mask_PT = sent_mask_TP.T.contiguous()
    copies_PT = sent_mask_PT.flatten().cumsum(0).view(num_ranks, num_tokens) - 1
    # one extra element receives the pairs that are not sent
    tokens = torch.arange(num_tokens, device=sent_mask_TP.device).expand(num_ranks, num_tokens)
    targets = torch.where(sent_mask_PT, copies_PT, num_copies)
    tokens_U = torch.empty(num_copies + 1, dtype=torch.int64, device=sent_mask_TP.device)
    tokens_U.scatter_(0, targets.flatten(), tokens.flatten())
    copies_TP = torch.where(sent_mask_PT, copies_PT, -1).T
    return copies_TP.int().contiguous(), tokens_U[:num_copies].int()
