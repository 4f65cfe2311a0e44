"""Recompute activations in backward instead of keeping them (arXiv:1604.06174).

`experts` repeats the expert MLPs only: no message is sent twice, but rows that experts fetch themselves come twice.
`block` repeats whole blocks, dispatch included.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from titan_moe.config.perf import MemoryConfig
from titan_moe.layers.block import Block
from titan_moe.layers.experts import GroupedExperts

CHOSEN: dict[str, Callable[[nn.Module], Iterable[nn.Module]]] = {
    "none": lambda model: (),
    "experts": lambda model: (module for module in model.modules() if isinstance(module, GroupedExperts)),
    "block": lambda model: model.get_submodule("layers").children(),  # of any class, a user's too
}
"""The recipe's `memory.recompute` -> the modules that keep their inputs only."""


def apply(model: nn.Module, config: MemoryConfig) -> None:
    """Replace the forward of the chosen modules by one that keeps its inputs only; parameter names do not change.

    Runs after compile: the recomputed region is outside the compiled one, which is exact on every supported torch. The
    experts of a block that is compiled whole are the exception: the compiler finds their region inside its graph and
    keeps their inputs only, which is exact too.
    """
    for module in CHOSEN[config.recompute](model):
        draws_nothing = type(module) in (Block, GroupedExperts)  # a user's block may have dropout
        module.forward = _recomputed(module.forward, keeps_rng=not draws_nothing)


def _recomputed(forward: Callable[..., Any], *, keeps_rng: bool) -> Callable[..., Any]:
    @wraps(forward)
    def recomputed(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=keeps_rng)

    return recomputed
