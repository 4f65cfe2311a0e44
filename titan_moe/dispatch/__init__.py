"""Rows travel once, experts own the order: how a token's row reaches the ranks whose experts want it, and comes back.

A dispatcher has no parameters and is no module. `local` moves nothing, `allgather` gathers every row, `alltoall` sends
a row once to each rank that wants it, `symm_mem` does so inside a node through shared memory, and `symm_experts` lets
the experts' GEMMs fetch rows and deliver results there; `cloning` wraps one of them, and lends hot experts to ranks
that have room. All of them give the same result; a new way to move rows is one new file.
"""

from titan_moe.dispatch.allgather import AllGatherDispatcher
from titan_moe.dispatch.alltoall import AllToAllDispatcher
from titan_moe.dispatch.base import Exchange, Routed, TokenDispatcher
from titan_moe.dispatch.cloning import CloningDispatcher
from titan_moe.dispatch.local import LocalDispatcher

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "CloningDispatcher",
    "Exchange",
    "LocalDispatcher",
    "Routed",
    "TokenDispatcher",
]
