"""Each row goes once to each rank that wants it, however many of that rank's experts chose it.

P ranks of the group · T tokens on this rank · K choices · U rows sent · S rows received · R slots · e experts on this
rank

Bytes: with 8 of 128 experts over 8 ranks a token's row travels to 5.3 ranks instead of 8 times, a third fewer bytes;
its K local ids and K fp32 scores travel beside it (1-2 % more). Sizes depend on the routing: one exchange of 2·P
counts tells every rank what comes, and the host reads them once a layer, in `_read_counts`. Ids, scores and rows start
one behind the other, the small ones first, so that slots can be laid out while rows travel.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config.dispatchers import ALLTOALL
from titan_moe.dispatch.base import Pending, Routed, TokenDispatcher, routed
from titan_moe.dispatch.collectives import SYNC, Collectives, all_to_all
from titan_moe.kernels.permute.permutation import Permutation, Permute, sort_by_expert
from titan_moe.kernels.permute.rows import gather_rows, sum_slots


class AllToAllExchange(NamedTuple):
    """Who sends what to whom. Copies are a rank's rows laid out by destination, then by token."""

    ids_TK: Tensor
    scores_TK: Tensor
    tokens_U: Tensor
    """int32, copy -> token."""
    copies_TP: Tensor
    """int32, token -> its copy for each rank, -1 for none."""
    rows_sent: list[int]
    """Copies for each rank."""
    rows_received: list[int]
    """Rows from each rank; their sum is S."""
    num_slots: int
    """Slots of this rank's experts (R), exact."""


class Sent(NamedTuple):
    """What a rank's choices and rows travel as."""

    ids_SK: Pending
    scores_SK: Pending
    x_SD: Pending


class AllToAllDispatcher(TokenDispatcher):
    """Send rows point to point; ranks may bring different numbers of tokens, none too."""

    facts = ALLTOALL

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        permute: Permute = sort_by_expert,
        wire: Collectives = SYNC,
    ) -> None:
        """`num_experts` is the layer's total; `group` holds the ranks that share it; `wire` carries the messages."""
        super().__init__(permute)
        self.group, self.wire = group, wire
        self.num_ranks = group.size()
        self.num_local_experts = num_experts // group.size()
        self.first_expert = self.num_local_experts * dist.get_rank(group)

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> AllToAllExchange:
        rank_TK = torch.where(topk_ids_TK < 0, -1, topk_ids_TK // self.num_local_experts)
        choices_TP = (rank_TK[:, :, None] == torch.arange(self.num_ranks, device=rank_TK.device)).sum(1)
        wanted_TP = choices_TP > 0
        rows_sent, rows_received, num_slots = self._read_counts(
            torch.stack([wanted_TP.sum(0), choices_TP.sum(0)], dim=1)
        )
        copies_TP, tokens_U = _number_copies(wanted_TP, sum(rows_sent))
        return AllToAllExchange(topk_ids_TK, topk_scores_TK, tokens_U, copies_TP, rows_sent, rows_received, num_slots)

    def start_dispatch(self, x_TD: Tensor, exchange: AllToAllExchange) -> Sent:
        start, way = self.wire.all_to_all.start, self._way_there(exchange)
        ids_SK = start(exchange.ids_TK[exchange.tokens_U].int(), *way)
        scores_SK = start(gather_rows(exchange.scores_TK, exchange.tokens_U, exchange.copies_TP), *way)
        x_SD = start(gather_rows(x_TD, exchange.tokens_U, exchange.copies_TP), *way)
        return Sent(ids_SK, scores_SK, x_SD)

    def finish_dispatch(self, sent: Sent, exchange: AllToAllExchange) -> Routed:
        wait, way = self.wire.all_to_all.wait, self._way_there(exchange)
        slots = self._permute(wait(sent.ids_SK, *way), wait(sent.scores_SK, *way), exchange.num_slots)
        return routed(wait(sent.x_SD, *way), slots, exchange)

    def start_combine(self, y_SD: Tensor, exchange: AllToAllExchange) -> Pending:
        return self.wire.all_to_all.start(y_SD, exchange.rows_sent, exchange.rows_received, self.group)

    def finish_combine(self, y: Pending, exchange: AllToAllExchange) -> Tensor:
        y_UD = self.wire.all_to_all.wait(y, exchange.rows_sent, exchange.rows_received, self.group)
        return sum_slots(y_UD, exchange.tokens_U, exchange.copies_TP)

    def _way_there(self, exchange: AllToAllExchange) -> tuple[list[int], list[int], dist.ProcessGroup]:
        return exchange.rows_received, exchange.rows_sent, self.group

    def _permute(self, ids_SK: Tensor, scores_SK: Tensor, num_slots: int) -> Permutation:
        ids_SK = ids_SK - self.first_expert
        local_ids_SK = torch.where((ids_SK >= 0) & (ids_SK < self.num_local_experts), ids_SK, -1)
        return self.permute(local_ids_SK, scores_SK, self.num_local_experts, num_slots)

    def _read_counts(self, sent_P2: Tensor) -> tuple[list[int], list[int], int]:
        """Tell every rank how many rows and slots it will get from each: the one host read of a layer."""
        one_each = [1] * self.num_ranks
        received_P2 = all_to_all(sent_P2, one_each, one_each, self.group)
        sent, received = torch.stack([sent_P2, received_P2]).tolist()
        return [rows for rows, _ in sent], [rows for rows, _ in received], sum(slots for _, slots in received)


def _number_copies(wanted_TP: Tensor, num_copies: int) -> tuple[Tensor, Tensor]:
    """Number the wanted (rank, token) pairs rank by rank: -> copies_TP (-1 for none) and tokens_U."""
    num_tokens, num_ranks = wanted_TP.shape
    wanted_PT = wanted_TP.T.contiguous()
    copies_PT = wanted_PT.flatten().cumsum(0).view(num_ranks, num_tokens) - 1
    # one extra element takes the pairs that nobody wants
    tokens = torch.arange(num_tokens, device=wanted_TP.device).expand(num_ranks, num_tokens)
    targets = torch.where(wanted_PT, copies_PT, num_copies)
    tokens_U = torch.empty(num_copies + 1, dtype=torch.int64, device=wanted_TP.device)
    tokens_U.scatter_(0, targets.flatten(), tokens.flatten())
    copies_TP = torch.where(wanted_PT, copies_PT, -1).T
    return copies_TP.int().contiguous(), tokens_U[:num_copies].int()
