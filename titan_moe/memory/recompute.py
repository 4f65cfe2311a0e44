"""Compute activations again in backward instead of keeping them, by name (config/recompute.py).

Of a checkpoint nothing is kept but its inputs (arXiv:1604.06174). Of other parts the outputs are not kept: whatever
saves one for backward, in the same block, saves how to make it again, and the part keeps what its own backward needs.
Which reader saves it does not matter: linear layers in any format, attention, the router, a dispatcher.

Fused experts keep rows alone (`moe_act`), or nothing (`experts`): over symmetric memory they get their rows again, and
no sum is repeated. Other experts are checkpoints, from rows that were received. `block` repeats whole blocks, dispatch
and combine included. Its routers keep their choice of experts, 4 bytes a choice: logits that differ in their last bits
between the two forwards would send tokens elsewhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titan_moe.config.recompute import RECOMPUTABLE, Recompute
from titan_moe.kernels.experts.fused_mlp import FusedMLP, Keep
from titan_moe.layers.attention import GroupedQueryAttention
from titan_moe.layers.balance import LoadBalance, repeated
from titan_moe.layers.block import Block
from titan_moe.layers.choice import KeptChoice, nothing_chosen, routing_by
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.mla import MultiHeadLatentAttention
from titan_moe.layers.mtp import MTPBlock
from titan_moe.layers.router import TopKRouter
from titan_moe.memory.repeated_outputs import RepeatedOutputs
from titan_moe.memory.saved_tensors import Scope

WAY_OUT = 'memory.recompute = "block" keeps it for the tokens of a block\'s first argument; take "experts" or "none"'
"""For a user's block that its routers' choices do not fit."""
KEPT = {"moe_act": Keep.ROWS, "experts": Keep.NOTHING}
"""What fused experts keep."""
DETERMINISTIC = (Block, MTPBlock, GroupedExperts, GroupedQueryAttention, MultiHeadLatentAttention)
"""Modules without random numbers. A user's block may have dropout."""


def parts_of(
    block: nn.Module, names: Sequence[str], parts: Mapping[str, Any] = RECOMPUTABLE
) -> Iterator[tuple[str, nn.Module, str]]:
    """The named parts of a block: name, the module that owns it, and its method. Parts that the block does not
    have are left out. A user's block may have its experts anywhere."""
    roots: list[Any] = [block]
    if not hasattr(block, "feed_forward"):
        with_experts = (it for it in block.modules() if isinstance(getattr(it, "experts", None), GroupedExperts))
        roots += [SimpleNamespace(feed_forward=layer) for layer in with_experts]
    for name in names:
        if not parts[name].paths:
            yield name, block, "forward"
        for root, path in product(roots, parts[name].paths):
            parent, _, last = path.rpartition(".")
            owner = root
            for step in filter(None, parent.split(".")):
                owner = getattr(owner, step, None)
            if isinstance(getattr(owner, last, None), nn.Module):
                yield name, getattr(owner, last), "forward"
            elif hasattr(owner, last):
                yield name, owner, last


def borders(model: nn.Module, recompute: Recompute) -> set[tuple[nn.Module, str]]:
    """The methods that no graph of the compiler may go beyond: their outputs, or inputs, are tensors of their own."""
    blocks = model.get_submodule("layers").named_children()
    parts = [part for layer, block in blocks for part in parts_of(block, recompute.names_of(int(layer)))]
    return {(module.out, "forward") if name == "attention" else (module, method) for name, module, method in parts}


def apply(model: nn.Module, recompute: Recompute, scopes: Mapping[str, Scope] | None = None) -> None:
    """Replace methods of the blocks' modules by those that keep less. Parameter names do not change. `scopes` are those
    of the blocks by layer, if others use them too.

    Runs after compile: what is computed again then surrounds compiled code, which is exact on every supported version
    of torch.
    """
    is_frozen = any(not parameter.requires_grad for parameter in model.parameters())
    for layer, block in model.get_submodule("layers").named_children():  # of any class, also a user's
        parts = list(parts_of(block, recompute.names_of(int(layer))))
        outputs = RepeatedOutputs((scopes or {}).get(layer))
        for name, module, method in parts:
            if RECOMPUTABLE[name].how == "outputs":
                setattr(module, method, outputs.of(getattr(module, method)))
            elif name in KEPT and isinstance(mlp := getattr(module, "mlp", None), FusedMLP):
                module.mlp = replace(mlp, keeps=KEPT[name])
            elif name != "block":
                _checkpoint(module, method, is_frozen=is_frozen)
        if any(RECOMPUTABLE[name].how == "outputs" for name, *_ in parts):
            outputs.scope.surround(block)
        if any(name == "block" for name, *_ in parts):
            _checkpoint(block, "forward", is_frozen=is_frozen)


def _checkpoint(module: nn.Module, method: str, *, is_frozen: bool) -> None:
    balances = [child for child in module.modules() if isinstance(child, LoadBalance)] if is_frozen else []
    routers = [router for router in module.modules() if isinstance(router, TopKRouter)]
    is_deterministic = type(module) in DETERMINISTIC
    repeated = _checkpointed(getattr(module, method), routers, balances, preserves_rng=not is_deterministic)
    setattr(module, method, repeated)


def _checkpointed(
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
            kept = (KeptChoice(router.route, *choice, WAY_OUT) for router, choice in zip(routers, choices, strict=True))
            with routing_by(routers, kept):  # as in the first forward with these choices
                return forward(*inputs)

        return checkpoint(run, *args, **options)

    return recomputed


def _nothing_chosen(router: TopKRouter, x_BND: Tensor) -> tuple[Tensor, Tensor]:
    num_sequences, num_tokens = x_BND.shape[:2]
    return nothing_chosen(num_sequences, num_tokens, len(router.expert_bias_E), router.rule.top_k, x_BND.device)
