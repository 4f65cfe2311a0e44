"""A complete dispatcher of one's own: class, facts, builder. Its only collective is the all-reduce.

P ranks of the group · T tokens on each of them · K choices · S rows of all ranks (P·T) · e experts on this rank
"""

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe import DispatcherFacts, Routed, TokenDispatcher, register_dispatcher
from titan_moe.dispatch.base import route

SUMMING = DispatcherFacts("summing", "sums the rows of all ranks, each in its place, by an all-reduce.", "every_row")


class AllReduce(torch.autograd.Function):
    """Sum over ranks, in backward too."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, total = group, x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return AllReduce.apply(grad, ctx.group), None


class SummingDispatcher(TokenDispatcher):
    facts = SUMMING

    def __init__(self, num_experts: int, group: dist.ProcessGroup, permute) -> None:
        super().__init__(permute)
        self.group, self.rank, self.num_ranks = group, group.rank(), group.size()
        self.num_local_experts = num_experts // group.size()

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> tuple[Tensor, Tensor]:
        ids_SK, e = self._all_ranks(topk_ids_TK + 1) - 1, self.num_local_experts
        return torch.where(ids_SK // e == self.rank, ids_SK % e, -1), self._all_ranks(topk_scores_TK)

    def start_dispatch(self, x_TD: Tensor, exchange: tuple[Tensor, Tensor]) -> Tensor:
        return self._all_ranks(x_TD)

    def finish_dispatch(self, x_SD: Tensor, exchange: tuple[Tensor, Tensor]) -> Routed:
        return route(x_SD, *exchange, self.num_local_experts, exchange[0].numel(), exchange, self.permute)

    def start_combine(self, y_SD: Tensor, exchange: tuple[Tensor, Tensor]) -> Tensor:
        return AllReduce.apply(y_SD, self.group).chunk(self.num_ranks)[self.rank]

    def finish_combine(self, y_TD: Tensor, exchange: tuple[Tensor, Tensor]) -> Tensor:
        return y_TD

    def _all_ranks(self, x_TD: Tensor) -> Tensor:
        before, after = self.rank * len(x_TD), (self.num_ranks - 1 - self.rank) * len(x_TD)
        return AllReduce.apply(torch.nn.functional.pad(x_TD, (0, 0, before, after)), self.group)


register_dispatcher(SUMMING, lambda inputs: SummingDispatcher(inputs.num_experts, inputs.group, inputs.permute))
