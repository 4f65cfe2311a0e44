"""Token dispatchers: dispatch rows to the ranks of their experts, and combine the results.

A dispatcher has no parameters and is not a module. All dispatchers give the same result; config/dispatchers.py says how
they differ. `cloning` wraps any of them and clones hot experts on ranks with a lower load, `optional_clones` only while
it is told to; `expert_tensor` wraps any of them for experts whose hidden width is split over ranks. See README.md.
"""

from titan_moe.dispatch.allgather import AllGatherDispatcher
from titan_moe.dispatch.alltoall import AllToAllDispatcher
from titan_moe.dispatch.base import Routed, TokenDispatcher
from titan_moe.dispatch.clones.dispatcher import CloningDispatcher
from titan_moe.dispatch.expert_tensor import ExpertTensorDispatcher
from titan_moe.dispatch.hierarchical import HierarchicalDispatcher
from titan_moe.dispatch.local import LocalDispatcher

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "CloningDispatcher",
    "ExpertTensorDispatcher",
    "HierarchicalDispatcher",
    "LocalDispatcher",
    "Routed",
    "TokenDispatcher",
]
