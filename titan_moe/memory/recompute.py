"""Recompute activations in backward instead of keeping them (arXiv:1604.06174).

`experts` recomputes only the expert MLPs. No collective is repeated; with `overlap = "tile"` the experts' own reads of
rows are. `block` recomputes whole blocks, dispatch and combine included.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from titan_moe.config.perf import MemoryConfig
from titan_moe.layers.block import Block
from titan_moe.layers.experts import GroupedExperts

RECOMPUTED: dict[str, Callable[[nn.Module], Iterable[nn.Module]]] = {
    "none": lambda model: (),
    "experts": lambda model: (module for module in model.modules() if isinstance(module, GroupedExperts)),
    "block": lambda model: model.get_submodule("layers").children(),  # of any class, also a user's
}
"""`memory.recompute` -> the modules that keep only their inputs."""


def apply(model: nn.Module, config: MemoryConfig) -> None:
    """Replace the forward of the selected modules by one that keeps only its inputs. Parameter names do not change.

    Runs after compile: the checkpointed region then surrounds the compiled one, which is exact on every supported
    version of torch. The experts of a block that is one graph are the exception: their checkpointed region is inside
    the graph, and the compiler keeps only their inputs, which is exact too.
    """
    for module in RECOMPUTED[config.recompute](model):
        is_deterministic = type(module) in (Block, GroupedExperts)  # a user's block may have dropout
        module.forward = _recomputed(module.forward, preserves_rng=not is_deterministic)


def _recomputed(forward: Callable[..., Any], *, preserves_rng: bool) -> Callable[..., Any]:
    @wraps(forward)
    def recomputed(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=preserves_rng)

    return recomputed
