"""Facts about dispatchers, one row each: the table that `parallel.dispatcher` names a row of.

Rules, plan, compile and traces ask facts, never names. A new dispatcher is a file in dispatch/, a row here and a
builder in parallel/dispatchers.py; `titan_moe.register_dispatcher` adds one of a user's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DispatcherFacts:
    """What a recipe and its plan depend on. The defaults are the cautious ones."""

    name: str
    """The value of `parallel.dispatcher`."""
    purpose: str
    """What it does, in one line; printed by `--explain`."""
    sends: Literal["nothing", "every_row", "once_a_rank"] = "once_a_rank"
    """Which rows leave a rank: none, all of them to every rank, or each once to every rank that holds one of its
    experts."""
    reads_host: bool = True
    """Whether the host reads sizes from the device. A CUDA graph or the graph of a whole block cannot contain that."""
    needs_cuda: bool = False
    """Whether it exists on GPUs only."""
    is_one_node: bool = False
    """Whether the ranks of an ep group must be on one node."""
    shares_memory: bool = False
    """Whether the ranks of an ep group exchange rows through memory that all of them reach."""
    can_be_bounded: bool = False
    """Whether `parallel.expert_rank_capacity_factor` bounds its slots; exact sizes need no bound."""
    overlaps: tuple[Literal["tile", "microbatch"], ...] = ()
    """The values of `parallel.overlap` that it supports beside `none`."""
    exchange_ops: tuple[str, ...] = ()
    """How the names of its own operations begin in a trace, if all of their time is communication. Collectives of
    torch.distributed are known."""

    @property
    def moves_rows(self) -> bool:
        """Whether rows reach experts on other ranks, as ep > 1 needs."""
        return self.sends != "nothing"


LOCAL = DispatcherFacts(
    "local",
    "sends nothing: every rank holds all experts (ep = 1).",
    sends="nothing",
    reads_host=False,
)
ALLGATHER = DispatcherFacts(
    "allgather",
    "gathers every row of the ep group; no host read.",
    sends="every_row",
    reads_host=False,
    can_be_bounded=True,
    overlaps=("microbatch",),
)
ALLTOALL = DispatcherFacts(
    "alltoall",
    "sends a row once to each rank that needs it, on any network; one host read a layer.",
    overlaps=("microbatch",),
)
SYMM_MEM = DispatcherFacts(
    "symm_mem",
    "sends a row once to each rank that needs it, over NVLink in a node; no host read.",
    reads_host=False,
    needs_cuda=True,
    is_one_node=True,
    shares_memory=True,
    can_be_bounded=True,
    overlaps=("tile",),
    exchange_ops=("titan_moe::symm_",),
)

DISPATCHERS = {facts.name: facts for facts in (LOCAL, ALLGATHER, ALLTOALL, SYMM_MEM)}
"""By name, in the order in which they are listed."""


def facts_of(name: str) -> DispatcherFacts:
    """Look up a row.

    Raises: ValueError for a name that is not in the table.
    """
    if name not in DISPATCHERS:
        raise ValueError(
            f'parallel.dispatcher = "{name}" is not in the table; take {dispatchers_that(lambda facts: True)}, or '
            "register it with titan_moe.register_dispatcher first"
        )
    return DISPATCHERS[name]


def dispatchers_that(have: Callable[[DispatcherFacts], bool]) -> str:
    """List the dispatchers with a fact, for a way out: `"allgather", "alltoall" or "symm_mem"`."""
    *others, last = [f'"{facts.name}"' for facts in DISPATCHERS.values() if have(facts)]
    return f"{', '.join(others)} or {last}" if others else last
