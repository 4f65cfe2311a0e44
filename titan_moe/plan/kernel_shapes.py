"""What each operation with several implementations works on in a run: the shape under which it is measured.

Routing is taken to be even, so that a rank serves as many slots as its own tokens choose, in other ranks' rows too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from titan_moe.config.recipe import Recipe
from titan_moe.plan.count import expert_width
from titan_moe.plan.floor import copies_on_the_wire

Shape = Mapping[str, int | str]
"""Sizes by name, for one call on one rank."""


@dataclass(frozen=True)
class Operation:
    """How to find an operation's shape, and when a measurement at one shape speaks for another."""

    shape: Callable[[Recipe], Shape]
    """The shape in a run of the recipe."""
    same: tuple[str, ...]
    """What must be equal in both shapes."""
    load: Callable[[Shape], float]
    """What may differ by a factor."""
    needs_experts: bool = False
    """Whether only layers with experts have it."""


def shapes_of(recipe: Recipe) -> dict[str, Shape]:
    """List the operations that the model has, each with its shape on one rank in one microbatch."""
    has_experts = recipe.model.num_moe_layers > 0
    return {
        name: operation.shape(recipe)
        for name, operation in OPERATIONS.items()
        if has_experts or not operation.needs_experts
    }


def _num_tokens(recipe: Recipe) -> int:
    return recipe.train.micro_batch_sequences * recipe.train.seq_len_tokens


def _num_rows(recipe: Recipe) -> int:
    """Rows that reach a rank: each token's row goes to every rank that it has a choice on."""
    ep, copies = recipe.parallel.ep, copies_on_the_wire(recipe)
    return round(_num_tokens(recipe) * copies * ep / (ep - 1)) if copies else _num_tokens(recipe)


def _experts(recipe: Recipe) -> Shape:
    moe = recipe.model.moe
    return {
        "rows": _num_rows(recipe),
        "choices": moe.top_k,
        "slots": _num_tokens(recipe) * moe.top_k,
        "experts": moe.num_experts // recipe.parallel.ep,
        "width": expert_width(recipe.model),
        "hidden": moe.ffn_hidden_size,
    }


def _slots(recipe: Recipe) -> Shape:
    moe = recipe.model.moe
    return {
        "rows": _num_rows(recipe),
        "choices": moe.top_k,
        "slots": _num_tokens(recipe) * moe.top_k,
        "experts": moe.num_experts // recipe.parallel.ep,
    }


def _router(recipe: Recipe) -> Shape:
    moe = recipe.model.moe
    return {
        "tokens": _num_tokens(recipe),
        "experts": moe.num_experts,
        "choices": moe.top_k,
        "groups": moe.num_groups,
        "chosen_groups": moe.top_k_groups,
        "score": moe.score_fn,
    }


def _norm(recipe: Recipe) -> Shape:
    return {"tokens": _num_tokens(recipe), "width": recipe.model.hidden_size}


def _rotary(recipe: Recipe) -> Shape:
    a = recipe.model.attention
    heads = {"query_heads": a.num_heads, "key_heads": a.num_kv_heads, "head_width": a.head_dim}
    if a.kind == "mla":
        heads = {"query_heads": a.num_heads, "key_heads": 1, "head_width": a.qk_rope_head_dim}
    return {"tokens": _num_tokens(recipe), **heads, "norm": "qk" if a.qk_norm else "none"}


def _head(recipe: Recipe) -> Shape:
    num_tokens = _num_tokens(recipe)
    return {
        "tokens": min(recipe.perf.loss_chunk_tokens or num_tokens, num_tokens),
        "vocabulary": recipe.model.vocab_size,
    }


def _tokens(shape: Shape) -> float:
    return float(shape["tokens"])


OPERATIONS = {
    "experts": Operation(
        _experts, ("width", "hidden"), lambda shape: float(shape["slots"]) / float(shape["experts"]), needs_experts=True
    ),
    "slots": Operation(_slots, ("choices", "experts"), lambda shape: float(shape["rows"]), needs_experts=True),
    "router": Operation(
        _router, ("experts", "choices", "groups", "chosen_groups", "score"), _tokens, needs_experts=True
    ),
    "norm": Operation(_norm, ("width",), _tokens),
    "rotary": Operation(_rotary, ("query_heads", "key_heads", "head_width", "norm"), _tokens),
    "head": Operation(_head, ("vocabulary",), _tokens),
}
"""Every field of `Kernels`."""
