"""The contract of all dispatchers.

T tokens on this rank · K experts a token · S rows received · R expert slots · D width · e experts on this rank

A *row* is a token's copy on a rank. A token is sent once to each rank that has one of its experts, however many of its
K experts that rank has. A *slot* is one row for one expert: a (token, expert) assignment on the expert's rank. The
experts' GEMMs compute slots, which are sorted by local expert; a slot refers to its row by index.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol, Self, final

from torch import Tensor

from titan_moe.config.dispatchers import DispatcherFacts
from titan_moe.config.dropping import expert_capacity
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.kernels.autocast import as_operand
from titan_moe.kernels.experts.composite_mlp import ExpertMLP
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.kernels.permute.permutation import Permutation, Permute, sort_by_expert

Exchange = Any
"""A dispatcher's state from `prepare` to `finish_combine`; each dispatcher has its own named tuple."""
Pending = Any
"""A collective that was started. Only the half that waits for it may use it."""


class ExpertInputs(Protocol):
    """What experts receive from a dispatcher: received rows (`Routed`), or the means to get them."""

    @property
    def exchange(self) -> Exchange:
        """What `start_combine` and `finish_combine` need."""

    @property
    def rows(self) -> Tensor:
        """The dispatcher's rows, [S, D], which may pass through autograd functions before the experts."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of rows and of slots, on which a compiled graph of the experts depends."""

    def run_mlp(self, mlp: ExpertMLP, rows: Tensor, weights: ExpertWeights) -> Any:
        """Compute every slot with the weights of its expert: -> what the dispatcher's `start_combine` takes."""

    def with_exchange(self, exchange: Exchange) -> "ExpertInputs":
        """The same inputs with the exchange of a dispatcher around this one."""


class Routed(NamedTuple):
    """The rows that this rank has received, and their expert slots.

    A named tuple, because FSDP2 finds tensors inside tuples but not inside dataclasses. No tensor here, those of the
    exchange included, may belong to an unfinished collective: FSDP2 adds zeros to the gradients of tensors that the
    experts do not use, and would read memory that is still being written. A row without a slot returns zero. Slots past
    `offsets_e[-1]` are never read.
    """

    x_SD: Tensor
    """Received rows, in a deterministic order."""
    rows_R: Tensor
    """int32, slot -> row of x_SD; slots are sorted by local expert."""
    slots_SK: Tensor
    """int32, row -> its slots, -1 for none."""
    scores_R: Tensor
    """fp32, routing score of each slot."""
    offsets_e: Tensor
    """int32 on the device, running ends of each local expert's slots."""
    exchange: Exchange
    """What `start_combine` and `finish_combine` need."""

    @property
    def rows(self) -> Tensor:
        return self.x_SD

    @property
    def sizes(self) -> tuple[int, int]:
        return self.x_SD.shape[0], self.rows_R.shape[0]

    def run_mlp(self, mlp: ExpertMLP, rows: Tensor, weights: ExpertWeights) -> Tensor:
        """-> the partial result of each row, [S, D]."""
        return mlp(rows, ExpertSlots(self.rows_R, self.slots_SK, self.scores_R, self.offsets_e), weights)

    def with_exchange(self, exchange: Exchange) -> "Routed":
        return self._replace(exchange=exchange)


def route(
    x_SD: Tensor,
    local_ids_SK: Tensor,
    scores_SK: Tensor,
    num_experts: int,
    num_slots: int,
    exchange: Exchange,
    permute: Permute = sort_by_expert,
) -> Routed:
    """Sort received assignments into slots: the last step of a dispatch.

    `num_slots` must be enough for all of them. A dispatcher with fewer slots calls `permute` itself and records its
    overflow flag.
    """
    return routed(x_SD, permute(local_ids_SK, scores_SK, num_experts, num_slots), exchange)


def routed(x_SD: Tensor, slots: Permutation, exchange: Exchange) -> Routed:
    """Received rows with their slots."""
    return Routed(x_SD, slots.rows_R, slots.slots_SK, slots.scores_R, slots.offsets_e, exchange)


class Padding(NamedTuple):
    """The capacity of experts (`model.moe.pad_to_capacity`): routers have dropped what exceeds it."""

    num_experts: int
    top_k: int
    capacity_factor: float

    def capacity(self, num_tokens: int) -> int:
        """The tokens that an expert gets from a rank, at most, of so many."""
        return expert_capacity(num_tokens, *self)


class TokenDispatcher(ABC):
    """Sends rows to the ranks of their experts, and partial results back.

    An exchange is `prepare`, then a dispatch and a combine in two halves each. A MoE layer calls `dispatch` and
    `combine`; the schedule that interleaves microbatches calls the halves. On rows, dispatch and combine are each
    other's transpose: the backward of each is the forward of the other.
    """

    facts: DispatcherFacts = DispatcherFacts("unregistered", "has no row in the table.")
    """Its row of config/dispatchers.py; without one, the cautious defaults."""
    padding: Padding | None = None
    """Set where routers drop what exceeds the capacity of experts, and slots are allocated for no more."""

    def __init__(self, permute: Permute = sort_by_expert, capacity: ExpertCapacity | None = None) -> None:
        """`permute` sorts received (token, expert) assignments into slots: one of `PERMUTE` in kernels/choose.py.
        `capacity` bounds rows or slots; None allocates for the worst case."""
        self.permute, self.capacity = permute, capacity or ExpertCapacity()

    def most_slots(self, num_slots: int, num_tokens: int, num_ranks: int, num_local_experts: int) -> int:
        """The slots of the worst case, `num_slots`, or those that experts have at most, where routers drop others:
        given the tokens of each rank, the ranks, and the experts of one."""
        if self.padding is None:
            return num_slots
        return min(num_slots, num_ranks * num_local_experts * self.padding.capacity(num_tokens))

    def __deepcopy__(self, memo: object) -> Self:
        """A copied model has the same dispatcher: process groups cannot be copied."""
        return self

    @abstractmethod
    def prepare(self, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> Exchange:
        """Compute which rows are sent where. Ids are global experts, -1 for none; scores are fp32."""

    @abstractmethod
    def start_dispatch(self, x_TD: Tensor, exchange: Exchange) -> Pending:
        """Start to send rows, ids and scores to the ranks of the experts; differentiable in rows and scores. What is
        computed before `finish_dispatch` hides the collectives. Rows are sent in their dtype, under autocast too."""

    @abstractmethod
    def finish_dispatch(self, pending: Pending, exchange: Exchange) -> ExpertInputs:
        """Wait for the rows, and sort their assignments by expert. No tensor of the result belongs to an unfinished
        collective."""

    @abstractmethod
    def start_combine(self, y_SD: Tensor, exchange: Exchange) -> Pending:
        """Start to send each row's partial result to the rank of its token. What is computed before `finish_combine`
        hides the collective."""

    @abstractmethod
    def finish_combine(self, pending: Pending, exchange: Exchange) -> Tensor:
        """Wait for the partial results and sum those of a token in at least fp32: -> [T, D]."""

    @final
    def dispatch(self, x_TD: Tensor, topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> ExpertInputs:
        """Send each row to its experts: `prepare`, `start_dispatch`, `finish_dispatch`. Under autocast rows are sent in
        its dtype."""
        exchange = self.prepare(topk_ids_TK, topk_scores_TK)
        return self.finish_dispatch(self.start_dispatch(as_operand(x_TD), exchange), exchange)

    @final
    def combine(self, y_SD: Any, inputs: ExpertInputs) -> Tensor:
        """Return the results to their tokens: `start_combine`, `finish_combine`."""
        return self.finish_combine(self.start_combine(y_SD, inputs.exchange), inputs.exchange)
