"""The shape of each operation with several implementations in a run: the key of its measurements.

Routing is assumed to be even: a rank has as many slots as its own tokens have assignments.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from titan_moe.config.parallel import resolve
from titan_moe.config.recipe import Recipe, expert_hidden_size, expert_slots, microbatch_tokens
from titan_moe.plan.links import rows_sent

Shape = Mapping[str, int | str]
"""Sizes by name, for one call on one rank, and words for what else its time depends on."""
OTHER_WORD = 10.0
"""A word that differs counts as a size ratio of this."""


@dataclass(frozen=True)
class Operation:
    """An operation's shape in a run, and the distance between two shapes."""

    shape: Callable[[Recipe], Shape]
    is_in: Callable[[Recipe, int], bool] = lambda recipe, world_size: True  # whether a run on so many ranks has it
    same: tuple[str, ...] = ()  # words that must be equal for shapes to be comparable

    def ratio(self, a: Shape, b: Shape) -> float:
        """The distance of two shapes: the product of the ratios of their sizes, the larger over the smaller.

        A word that differs counts as `OTHER_WORD`. Infinite if they are not comparable: a size is 0 in one alone
        (`chunk`), or a word of `same` differs.
        """
        return math.prod(self._ratio(name, a[name], b[name]) for name in b)

    def _ratio(self, name: str, x: int | str, y: int | str) -> float:
        if x == y:
            return 1.0
        if name in self.same or 0 in (x, y):
            return math.inf
        return max(x / y, y / x) if isinstance(x, int) and isinstance(y, int) else OTHER_WORD


def shapes_of(recipe: Recipe, world_size: int) -> dict[str, Shape]:
    """List the operations that a run has, each with its shape on one rank in one microbatch."""
    found = {name: operation for name, operation in OPERATIONS.items() if operation.is_in(recipe, world_size)}
    return {name: operation.shape(recipe) for name, operation in found.items()}


def _has_experts(recipe: Recipe, world_size: int) -> bool:
    return recipe.model.num_moe_layers > 0


def _adds_gradients(recipe: Recipe, world_size: int) -> bool:
    """Whether expert weights are cast outside of graphs and FSDP, so that their gradients are accumulated by us."""
    is_cast = recipe.precision.compute != recipe.precision.master
    is_unsharded = resolve(recipe.parallel, world_size).experts_are_unsharded(recipe.precision)
    return _has_experts(recipe, world_size) and is_cast and is_unsharded and not recipe.compile.compiles_blocks()


def _num_rows(recipe: Recipe) -> int:
    """Rows that a rank receives at once: each row of an etp group is sent to every rank that holds one of its
    experts."""
    p, num_tokens = recipe.parallel, microbatch_tokens(recipe) * recipe.parallel.etp
    # a node's ranks forward what they receive for others
    ep, copies = p.ep, rows_sent(recipe, p.ep, "once_a_rank" if p.facts.has_two_levels else "").all
    return round(num_tokens * copies * ep / (ep - 1)) if copies else num_tokens


def _load(recipe: Recipe) -> Shape:
    """The input of a rank's experts in one call."""
    moe = recipe.model.moe
    return {
        "rows": _num_rows(recipe),
        "choices": moe.top_k,
        "slots": expert_slots(recipe),
        "experts": moe.num_experts // recipe.parallel.ep,
    }


def _experts(recipe: Recipe) -> Shape:
    return {**_load(recipe), "width": recipe.model.expert_width, "hidden": expert_hidden_size(recipe)}


def _permute(recipe: Recipe) -> Shape:
    return {**_load(recipe), "graph": "in a block's graph" if recipe.compile.compiles_blocks() else "eager"}


def _router(recipe: Recipe) -> Shape:
    moe = recipe.model.moe
    return {
        "tokens": microbatch_tokens(recipe),
        "sequences": recipe.train.micro_batch_sequences,
        "width": recipe.model.hidden_size,
        "experts": moe.num_experts,
        "choices": moe.top_k,
        "groups": moe.num_groups,
        "chosen_groups": moe.top_k_groups,
        "group_score": moe.group_score if moe.num_groups > 1 else "ungrouped",
        "score": moe.score_fn,
        "weights": "normalised" if moe.normalize_topk else "as scored",
        "losses": _balancing_losses(recipe),
    }


def _balancing_losses(recipe: Recipe) -> str:
    """Losses of the router with gradients: `aux loss and z loss`, or `aux loss by score`."""
    moe = recipe.model.moe
    selects_by_score = moe.bias_update_speed == 0 and moe.num_groups == 1
    aux_loss = "aux loss" if selects_by_score else "aux loss by score"
    losses = ((aux_loss, moe.aux_loss_coef), ("z loss", moe.z_loss_coef))
    return " and ".join(name for name, weight in losses if weight) or "no loss"


def _rotary(recipe: Recipe) -> Shape:
    a, p = recipe.model.attention, recipe.parallel
    num_parts = p.tp * (p.cp if p.cp_kind == "ulysses" else 1)  # ranks that have other heads of the same tokens
    return {
        "tokens": microbatch_tokens(recipe) * num_parts,
        "sequences": recipe.train.micro_batch_sequences,
        "query_heads": a.num_heads // num_parts,
        "key_heads": max(a.num_kv_heads // num_parts, 1),
        "head_width": a.head_dim,
        "norm": "qk norm" if a.qk_norm else "no qk norm",
        "pairs": "neighbours" if a.rope_is_interleaved else "halves",
    }


def _head(recipe: Recipe) -> Shape:
    tp = recipe.parallel.tp
    num_tokens = microbatch_tokens(recipe) * tp
    return {
        "tokens": num_tokens,
        "chunk": min(recipe.perf.loss_chunk_tokens, num_tokens),  # 0: all logits at once, not comparable
        "width": recipe.model.hidden_size,
        "vocabulary": recipe.model.vocab_size // tp,
    }


def _gradients(recipe: Recipe) -> Shape:
    """The sum of gate and up, the larger weight of a layer's experts."""
    precision, num_experts = recipe.precision, recipe.model.moe.num_experts // recipe.parallel.ep
    return {
        "elements": num_experts * 2 * expert_hidden_size(recipe) * recipe.model.expert_width,
        "dtypes": f"{precision.compute} to {precision.master}",
    }


OPERATIONS = {
    "experts": Operation(_experts, _has_experts),
    "permute": Operation(_permute, _has_experts),
    "router": Operation(_router, _has_experts),
    "rotary": Operation(_rotary, lambda recipe, _: recipe.model.attention.kind == "gqa"),  # mla rotates in PyTorch
    "head": Operation(_head),
    "gradients": Operation(_gradients, _adds_gradients, same=("dtypes",)),
}
"""One for each field of `KernelOverrides`."""


def linear_shape(recipe: Recipe, widths: tuple[int, int], num_ranks: int = 1) -> Shape:
    """The GEMMs of a dense linear layer in one microbatch: widths of a rank, tokens of so many."""
    return {"tokens": num_ranks * microbatch_tokens(recipe), "input": widths[0], "output": widths[1]}


FORMAT_OPERATIONS = {
    "experts_in_formats": Operation(_experts, _has_experts),
    "linear_in_formats": Operation(lambda recipe: linear_shape(recipe, (1, 1))),
}
"""GEMMs measured once for each format, quantisation included: `titan-moe tune` does it, and `plan.format_choice`
compares them with bf16. Experts include the quantisation of their weights, once a call."""
