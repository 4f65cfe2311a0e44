"""Facts about dispatchers, a row each, by the name in `parallel.dispatcher`.

Rules, plan, compile and traces read facts, never names. A new dispatcher is a file in dispatch/, a row here and a
builder in parallel/dispatchers.py; `titan_moe.register_dispatcher` adds one of a user's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from titan_moe.config.schema import either


@dataclass(frozen=True)
class DispatcherFacts:
    """Facts about a dispatcher that rules, plan, compile and traces read. The defaults are the cautious ones."""

    name: str  # the value of `parallel.dispatcher`
    purpose: str  # one line; printed by `--explain`
    sends: Literal["nothing", "every_row", "once_a_rank", "once_a_node"] = "once_a_rank"
    """The rows that a rank sends: none; all rows to every rank; each row once to every rank that holds one of its
    experts; or each row once to every node that holds one, which forwards it to those ranks."""
    reads_host: bool = True
    """Whether the host reads sizes from the device. A CUDA graph cannot contain that."""
    needs_cuda: bool = False
    is_one_node: bool = False  # whether the ranks of an ep group must be on one node
    shares_memory: bool = False  # whether ranks of a node exchange rows through symmetric memory
    can_be_bounded: bool = False
    """Whether `parallel.expert_rank_capacity_factor` bounds its slots; exact sizes need no bound."""
    pads_to_capacity: bool = False
    """Whether its slots can be those of `model.moe.capacity_factor` (`model.moe.pad_to_capacity`)."""
    overlaps: tuple[Literal["tile", "microbatch"], ...] = ()
    """The values of `parallel.overlap` that it supports beside `none`."""
    exchange_ops: tuple[str, ...] = ()
    """Prefixes of the dispatcher's operations that count as communication in a trace, beside torch.distributed's."""

    @property
    def moves_rows(self) -> bool:
        """Whether it sends rows to experts on other ranks, which ep > 1 needs."""
        return self.sends != "nothing"

    @property
    def has_two_levels(self) -> bool:
        """Whether it sends rows between nodes, and then within them."""
        return self.sends == "once_a_node"

    @property
    def shares_memory_of_ep(self) -> bool:
        """Whether all ranks of an ep group share memory: also for clones, and for experts that get rows themselves."""
        return self.shares_memory and not self.has_two_levels


LOCAL = DispatcherFacts(
    "local",
    "sends nothing: every rank holds all experts (ep = 1).",
    sends="nothing",
    reads_host=False,
    pads_to_capacity=True,
)
ALLGATHER = DispatcherFacts(
    "allgather",
    "gathers every row of the ep group; no host read.",
    sends="every_row",
    reads_host=False,
    can_be_bounded=True,
    pads_to_capacity=True,
    overlaps=("microbatch",),
)
ALLTOALL = DispatcherFacts(
    "alltoall",
    "sends a row once to each rank that needs it; one host read a layer.",
    overlaps=("microbatch",),
)
HIERARCHICAL = DispatcherFacts(
    "hierarchical",
    "sends a row once a node, and there once a rank; one host read a layer.",
    sends="once_a_node",
    overlaps=("microbatch",),
)
HIERARCHICAL_SYMM_MEM = DispatcherFacts(
    "hierarchical_symm_mem",
    "as hierarchical, over NVLink within a node; no host read.",
    sends="once_a_node",
    reads_host=False,
    needs_cuda=True,
    shares_memory=True,
    can_be_bounded=True,
    overlaps=("microbatch",),
    exchange_ops=("titan_moe::symm_",),
)
SYMM_MEM = DispatcherFacts(
    "symm_mem",
    "as alltoall, over NVLink within a node; no host read.",
    reads_host=False,
    needs_cuda=True,
    is_one_node=True,
    shares_memory=True,
    can_be_bounded=True,
    pads_to_capacity=True,
    overlaps=("tile",),
    exchange_ops=("titan_moe::symm_",),
)

DISPATCHERS = {
    facts.name: facts for facts in (LOCAL, ALLGATHER, ALLTOALL, SYMM_MEM, HIERARCHICAL, HIERARCHICAL_SYMM_MEM)
}
"""By name, in the order of lists."""
WAY_TO_ADD = (
    "for one of your own, start a script that imports its module, with titan_moe.register_dispatcher, and then calls "
    "titan_moe.cli.main"
)
"""Said of a name that is not in the table."""


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
    return either(facts.name for facts in DISPATCHERS.values() if have(facts))
