"""All experts are on this rank: no communication.

T tokens · K experts a token
"""

from typing import NamedTuple

from torch import Tensor

from titan_moe.config.dispatchers import LOCAL
from titan_moe.dispatch.base import Routed, TokenDispatcher, route
from titan_moe.kernels.permute.permutation import Permute, sort_by_expert


class LocalExchange(NamedTuple):
    """The routing."""

    ids_TK: Tensor
    scores_TK: Tensor


class LocalDispatcher(TokenDispatcher):
    """Dispatch without communication: the received rows are the tokens themselves (S = T, R = T·K)."""

    facts = LOCAL

    def __init__(self, num_experts: int, permute: Permute = sort_by_expert) -> None:
        super().__init__(permute)
        self.num_experts = num_experts

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> LocalExchange:
        return LocalExchange(topk_ids_TK, topk_scores_TK)

    def start_dispatch(self, x_TD: Tensor, exchange: LocalExchange) -> Tensor:
        return x_TD

    def finish_dispatch(self, pending: Tensor, exchange: LocalExchange) -> Routed:
        ids_TK, scores_TK = exchange
        num_slots = self.most_slots(ids_TK.numel(), len(ids_TK), 1, self.num_experts)
        return route(pending, ids_TK, scores_TK, self.num_experts, num_slots, exchange, self.permute)

    def start_combine(self, y_SD: Tensor, exchange: LocalExchange) -> Tensor:
        return y_SD

    def finish_combine(self, y: Tensor, exchange: LocalExchange) -> Tensor:
        return y
