"""Rows of tokens to the ranks that need them by all-to-all, and their partial results back.

P ranks of a group · T tokens on this rank · U rows sent, one for each rank that needs the token · S rows received

`alltoall` is one such exchange over all ranks of an ep group, `hierarchical` is two: between nodes and within a node.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.dispatch.base import Pending
from titan_moe.dispatch.collectives import Collectives
from titan_moe.kernels.experts.formats import COMPUTE
from titan_moe.kernels.permute.rows import gather_rows, sum_slots


class RowCopies(NamedTuple):
    """The rows that this rank sends, by destination, then by token, and how many come back."""

    tokens_U: Tensor
    """int32, copy -> token."""
    copies_TP: Tensor
    """int32, token -> its copy for each destination rank, -1 for none."""
    rows_sent: list[int]
    """Number of copies for each rank; their sum is U."""
    rows_received: list[int]
    """Number of rows from each rank; their sum is S."""


def copy_rows(sent_mask_TP: Tensor, rows_sent: list[int], rows_received: list[int]) -> RowCopies:
    """Number the (rank, token) pairs that are sent, rank by rank."""
    (num_tokens, num_ranks), num_copies = sent_mask_TP.shape, sum(rows_sent)
    sent_mask_PT = sent_mask_TP.T.contiguous()
    copies_PT = sent_mask_PT.flatten().cumsum(0).view(num_ranks, num_tokens) - 1
    # one extra element receives the pairs that are not sent
    tokens = torch.arange(num_tokens, device=sent_mask_TP.device).expand(num_ranks, num_tokens)
    targets = torch.where(sent_mask_PT, copies_PT, num_copies)
    tokens_U = torch.empty(num_copies + 1, dtype=torch.int64, device=sent_mask_TP.device)
    tokens_U.scatter_(0, targets.flatten(), tokens.flatten())
    copies_TP = torch.where(sent_mask_PT, copies_PT, -1).T
    return RowCopies(tokens_U[:num_copies].int(), copies_TP.int().contiguous(), rows_sent, rows_received)


class PendingRows(NamedTuple):
    """The pending all-to-alls of ids, scores and rows."""

    ids_SK: Pending
    scores_SK: Pending
    x_SD: Pending


class RowExchange:
    """Sends rows with their ids and scores over one group, and sums their partial results.

    The collectives of ids and scores start before that of the rows, so that the receiver can plan while rows are sent.
    Every method takes the copies of one exchange; the object itself keeps none.
    """

    def __init__(self, group: dist.ProcessGroup, collectives: Collectives, row_format: str) -> None:
        """`row_format` is how rows and gradients of results are sent (`FORMATS`); sums are sent as they are."""
        self.group, self.all_to_all, self.row_format = group, collectives.all_to_all, row_format

    def start(self, x_TD: Tensor, ids_UK: Tensor, scores_TK: Tensor, copies: RowCopies) -> PendingRows:
        """Start to send rows, ids and scores; differentiable in rows and scores. Ids are those of the copies."""
        start, splits, (tokens_U, copies_TP, *_) = self.all_to_all.start, self._splits(copies), copies
        ids_SK = start(ids_UK.int(), *splits)
        scores_SK = start(gather_rows(scores_TK, tokens_U, copies_TP), *splits)
        x_SD = start(gather_rows(x_TD, tokens_U, copies_TP), *splits, self.row_format, COMPUTE)
        return PendingRows(ids_SK, scores_SK, x_SD)

    def wait_assignments(self, pending: PendingRows, copies: RowCopies) -> tuple[Tensor, Tensor]:
        """Wait for ids_SK and scores_SK."""
        wait, splits = self.all_to_all.wait, self._splits(copies)
        return wait(pending.ids_SK, *splits), wait(pending.scores_SK, *splits)

    def wait_rows(self, pending: PendingRows, copies: RowCopies) -> Tensor:
        """Wait for x_SD."""
        return self.all_to_all.wait(pending.x_SD, *self._splits(copies), self.row_format, COMPUTE)

    def start_back(self, y_SD: Tensor, copies: RowCopies) -> Pending:
        """Start to send each row's partial result to the rank that sent the row."""
        return self.all_to_all.start(y_SD, *self._splits_back(copies), COMPUTE, self.row_format)

    def sum_back(self, pending: Pending, copies: RowCopies) -> Tensor:
        """Wait for the partial results and sum those of each token in at least fp32 and in rank order: -> [T, D]."""
        y_UD = self.all_to_all.wait(pending, *self._splits_back(copies), COMPUTE, self.row_format)
        return sum_slots(y_UD, copies.tokens_U, copies.copies_TP)

    def _splits(self, copies: RowCopies) -> tuple[Sequence[int], Sequence[int], dist.ProcessGroup]:
        return copies.rows_received, copies.rows_sent, self.group

    def _splits_back(self, copies: RowCopies) -> tuple[Sequence[int], Sequence[int], dist.ProcessGroup]:
        return copies.rows_sent, copies.rows_received, self.group
