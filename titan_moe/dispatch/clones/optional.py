"""Clones that are switched on and off between steps.

While they are off, a layer is that of a recipe without clones: its rows are sent by a dispatcher of its own experts, so
no counts are exchanged, nothing is planned, and no weights or gradients of clones are sent, forward or backward.
"""

from torch import Tensor

from titan_moe.dispatch.base import Exchange, ExpertInputs, Pending, TokenDispatcher
from titan_moe.dispatch.clones.dispatcher import CloningDispatcher


class ReplicaSlots:
    """The replica slots of every layer on every rank, and whether exchanges use them. All layers share it.

    `are_used` changes between steps only, on all ranks alike. A compiled graph and a recording hold for one value.
    """

    def __init__(self, number: int = 0, *, are_used: bool = False, cost: int = 0) -> None:
        """`number` is that of a layer on a rank; `cost` as for `plan_clones`."""
        self.number, self.are_used, self.cost = number, are_used, cost

    @property
    def number_in_use(self) -> int:
        """The replica slots of a layer that exchanges use now."""
        return self.number if self.are_used else 0


class OptionalClonesDispatcher(TokenDispatcher):
    """Dispatch with clones while the replica slots are used, and else without."""

    def __init__(self, plain: TokenDispatcher, cloning: CloningDispatcher, replicas: ReplicaSlots) -> None:
        """Both dispatchers have the same group, permute, capacity and memory."""
        super().__init__(plain.permute, plain.capacity)
        self.plain, self.cloning, self.replicas = plain, cloning, replicas
        self.facts = plain.facts

    @property
    def current(self) -> TokenDispatcher:
        """The dispatcher of this step."""
        return self.cloning if self.replicas.are_used else self.plain

    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> Exchange:
        return self.current.prepare(topk_ids_TK, topk_scores_TK)

    def start_dispatch(self, x_TD: Tensor, exchange: Exchange) -> Pending:
        return self.current.start_dispatch(x_TD, exchange)

    def finish_dispatch(self, pending: Pending, exchange: Exchange) -> ExpertInputs:
        return self.current.finish_dispatch(pending, exchange)

    def start_combine(self, y_SD: Tensor, exchange: Exchange) -> Pending:
        return self.current.start_combine(y_SD, exchange)

    def finish_combine(self, pending: Pending, exchange: Exchange) -> Tensor:
        return self.current.finish_combine(pending, exchange)
