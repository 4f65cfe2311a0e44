"""A dispatcher around another one, for experts whose hidden width is split over ranks (expert tensor parallelism).

T tokens on this rank · K experts a token · N ranks of the etp group · F hidden width of an expert · D width

Every rank of the group has F/N of each expert and needs the rows of all N·T tokens of the group. So ids, scores and
rows are all-gathered before the inner dispatcher sends them over ep, and the partial results that it returns are
reduce-scattered to their tokens. Ranks with the same etp coordinate are the inner dispatcher's group. Its exchanges are
the same for every coordinate, clones included, because the rows are.

Bytes: a rank receives (N-1)·T·D elements before and after the experts, in backward too; the inner dispatcher moves N
times as many rows as for T tokens. Sizes are static, and the host reads nothing here.

Gradients: those of results are gathered, so every rank has them whole. Those of rows and scores are partial sums over
F, which the backward of the gather adds up, in at least fp32.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from titan_moe.dispatch.base import Exchange, ExpertInputs, Pending, TokenDispatcher
from titan_moe.dispatch.collectives import all_gather, reduce_scatter


class ExpertTensorDispatcher(TokenDispatcher):
    """Dispatch the tokens of all ranks of an etp group, and add up their partial results. Every rank must have the same
    number of tokens."""

    def __init__(self, inner: TokenDispatcher, group: dist.ProcessGroup) -> None:
        """`group` is the etp group; `inner` sends rows between ranks with the same etp coordinate."""
        super().__init__(inner.permute, inner.capacity)
        self.inner, self.group = inner, group
        self.facts = inner.facts

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> Exchange:
        return self.inner.prepare(all_gather(topk_ids_TK, self.group), all_gather(topk_scores_TK, self.group))

    def start_dispatch(self, x_TD: Tensor, exchange: Exchange) -> Pending:
        # complete before the inner dispatcher starts: ranks of an etp group are neighbours, those of ep may be far
        return self.inner.start_dispatch(all_gather(x_TD, self.group), exchange)

    def finish_dispatch(self, pending: Pending, exchange: Exchange) -> ExpertInputs:
        return self.inner.finish_dispatch(pending, exchange)

    def start_combine(self, y_SD: Any, exchange: Exchange) -> Pending:
        return self.inner.start_combine(y_SD, exchange)

    def finish_combine(self, pending: Pending, exchange: Exchange) -> Tensor:
        return reduce_scatter(self.inner.finish_combine(pending, exchange), self.group)
