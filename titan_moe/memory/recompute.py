"""Recompute activations in backward instead of keeping them (arXiv:1604.06174).

`experts` repeats the expert MLPs only: no message is sent twice. `block` repeats whole blocks, dispatch included.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from titan_moe.config.perf import MemoryConfig
from titan_moe.layers.block import Block
from titan_moe.layers.experts import GroupedExperts

WHAT: dict[str, tuple[type[nn.Module], ...]] = {"none": (), "experts": (GroupedExperts,), "block": (Block,)}


def apply(model: nn.Module, config: MemoryConfig) -> None:
    """Replace the forward of the chosen modules by one that keeps its inputs only; parameter names do not change.

    Runs after compile: the recomputed region is outside the compiled one, which is exact on every supported torch.
    """
    for module in model.modules():
        if isinstance(module, WHAT[config.recompute]):
            module.forward = _recomputed(module.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def recomputed(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    return recomputed
