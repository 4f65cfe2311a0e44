"""Dispatch and combine: how a token's row reaches the ranks of its experts, and how their results come back.

A dispatcher has no parameters and is no module. All of them give the same result; config/dispatchers.py says how they
differ. `cloning` wraps any of them and clones hot experts onto ranks with a lower load.
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
