"""Recompute activations in backward instead of keeping them (arXiv:1604.06174).

`experts` recomputes only the expert MLPs. No collective is repeated; with `overlap = "tile"` the experts' own reads of
rows are. `block` recomputes whole blocks, dispatch and combine included. Its routers keep their choice of experts, 4
bytes a choice: logits that differ in their last bits between the two forwards would send tokens elsewhere.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titan_moe.config.perf import MemoryConfig
from titan_moe.layers.balance import LoadBalance, repeated
from titan_moe.layers.block import Block
from titan_moe.layers.choice import KeptChoice, nothing_chosen
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.router import TopKRouter

RECOMPUTED: dict[str, Callable[[nn.Module], Iterable[nn.Module]]] = {
    "none": lambda model: (),
    "experts": lambda model: (module for module in model.modules() if isinstance(module, GroupedExperts)),
    "block": lambda model: model.get_submodule("layers").children(),  # of any class, also a user's
}
"""`memory.recompute` -> the modules that keep only their inputs, and the choices of their routers."""
WAY_OUT = 'memory.recompute = "block" keeps it for the tokens of a block\'s first argument; take "experts" or "none"'
"""For a user's block that its routers' choices do not fit."""


def apply(model: nn.Module, config: MemoryConfig) -> None:
    """Replace the forward of the selected modules by one that keeps only its inputs. Parameter names do not change.

    Runs after compile: the checkpointed region then surrounds the compiled one, which is exact on every supported
    version of torch.
    """
    is_frozen = any(not parameter.requires_grad for parameter in model.parameters())
    for module in RECOMPUTED[config.recompute](model):
        balances = [child for child in module.modules() if isinstance(child, LoadBalance)] if is_frozen else []
        is_deterministic = type(module) in (Block, GroupedExperts)  # a user's block may have dropout
        routers = [router for router in module.modules() if isinstance(router, TopKRouter)]
        module.forward = _recomputed(module.forward, routers, balances, preserves_rng=not is_deterministic)


def _recomputed(
    forward: Callable[..., Any],
    routers: Sequence[TopKRouter],
    balances: Sequence[LoadBalance],
    *,
    preserves_rng: bool,
) -> Callable[..., Any]:
    """`balances` are those that may count in forward, of frozen routers."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), repeated(balances)

    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserves_rng}
    options |= {"context_fn": contexts} if balances else {}

    @wraps(forward)
    def recomputed(*args: Any) -> Any:
        if not routers or not torch.is_grad_enabled():
            return checkpoint(forward, *args, **options)
        choices = [_nothing_chosen(router, args[0]) for router in routers]  # of this forward: others are in flight

        def run(*inputs: Any) -> Any:
            with _keeping(routers, choices):
                return forward(*inputs)

        return checkpoint(run, *args, **options)

    return recomputed


def _nothing_chosen(router: TopKRouter, x_BND: Tensor) -> tuple[Tensor, Tensor]:
    num_sequences, num_tokens = x_BND.shape[:2]
    return nothing_chosen(num_sequences, num_tokens, len(router.expert_bias_E), router.rule.top_k, x_BND.device)


@contextmanager
def _keeping(routers: Sequence[TopKRouter], choices: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Let the routers choose as in the first forward with these choices."""
    routes = [router.route for router in routers]
    try:
        for router, route, choice in zip(routers, routes, choices, strict=True):
            router.route = KeptChoice(route, *choice, WAY_OUT)
        yield
    finally:
        for router, route in zip(routers, routes, strict=True):
            router.route = route
