"""Token dropping: an expert takes no more assignments than its capacity (arXiv:2006.16668, arXiv:2101.03961).

B batch · N sequence · G groups of tokens with a capacity each · n tokens of a group · E experts · K choices a token

A dropped assignment has no expert and no weight; the weights of a token's others stay. A token without any has the
result of the shared experts alone, beside the residual. This is Megatron Core's `apply_router_token_dropping`, on the
tokens that a rank routes in one forward. Counts and balancing losses are those of the choice before.

Generated texts drop nothing (`dropping_nothing`): what a forward drops depends on the other prompts, on padding, and on
which tokens are in the cache already.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.config.dropping import expert_capacity
from titan_moe.config.model import MoEConfig
from titan_moe.kernels.router.routing import RouteTokens, Routing, RoutingRule

NONE_CHOSEN = -1
"""In kept ids: nothing is known of a token's choice yet."""


class DroppingRoute:
    """Route as another function does, and drop what exceeds the capacity.

    It takes the place of `TopKRouter.route`. The id of a dropped assignment is `dropped(id)`, below -1. So what keeps
    the ids for a repeated forward keeps what was dropped too: scores that differ in their last bits would drop others.
    """

    def __init__(self, route: RouteTokens, config: MoEConfig) -> None:
        self.route, self.factor = route, config.capacity_factor
        self.is_by_score, self.is_of_sequences = config.drop_policy == "probs", config.drop_over == "sequence"

    def __call__(
        self,
        logits_BNE: Tensor,
        expert_bias_E: Tensor,
        rule: RoutingRule,
        forced_ids_BNK: Tensor | None = None,
        kept_ids_BNK: Tensor | None = None,
    ) -> Routing:
        """Route, with the ids and what was dropped of kept ids."""
        chosen_BNK = None if kept_ids_BNK is None else chosen(kept_ids_BNK)
        routing = self.route(logits_BNE, expert_bias_E, rule, forced_ids_BNK, chosen_BNK)
        fits_BNK = self._fits(routing, logits_BNE.shape[-1])
        if kept_ids_BNK is not None:
            fits_BNK = torch.where(kept_ids_BNK == NONE_CHOSEN, fits_BNK, kept_ids_BNK > NONE_CHOSEN)
        scores_BNK = torch.where(fits_BNK, routing.topk_scores_BNK, 0.0)
        ids_BNK = torch.where(fits_BNK, routing.topk_ids_BNK, dropped(routing.topk_ids_BNK))
        return routing._replace(topk_scores_BNK=scores_BNK, topk_ids_BNK=ids_BNK)

    def _fits(self, routing: Routing, num_experts: int) -> Tensor:
        """Whether each assignment is within the capacity of its expert: bool [B, N, K]."""
        ids_BNK, scores_BNK = routing.topk_ids_BNK, routing.topk_scores_BNK.detach()
        ids_GnK, scores_GnK = (x if self.is_of_sequences else x.flatten(0, 1)[None] for x in (ids_BNK, scores_BNK))
        capacity = expert_capacity(ids_GnK.shape[1], num_experts, ids_GnK.shape[2], self.factor)
        places_GnK = places_of(ids_GnK, scores_GnK if self.is_by_score else None, num_experts)
        return (places_GnK < capacity).view_as(ids_BNK)


@contextmanager
def dropping_nothing(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Let all tokens have all their experts within a `with` block, and allocate slots for as many."""
    modules: list[Any] = [module for part in parts for module in part.modules()]
    routed = [(it, it.route) for it in modules if isinstance(getattr(it, "route", None), DroppingRoute)]
    dispatchers = {id(it.dispatcher): it.dispatcher for it in modules if hasattr(it, "dispatcher")}
    padded = [(it, it.padding) for it in dispatchers.values() if getattr(it, "padding", None) is not None]
    try:
        for router, route in routed:
            router.route = route.route
        for dispatcher, _ in padded:
            dispatcher.padding = None
        yield
    finally:
        for router, route in routed:
            router.route = route
        for dispatcher, padding in padded:
            dispatcher.padding = padding


def dropped(ids: Tensor) -> Tensor:
    """The ids of dropped assignments, for those of the experts."""
    return -2 - ids


def chosen(ids: Tensor) -> Tensor:
    """The ids of the experts that were chosen, dropped or not."""
    return torch.where(ids < NONE_CHOSEN, -2 - ids, ids)


def places_of(ids_GnK: Tensor, scores_GnK: Tensor | None, num_experts: int) -> Tensor:
    """The place of each assignment in the queue of its expert, in each group: by score, the highest first, or without
    scores by position. Among equal scores the first token is first."""
    if scores_GnK is None:
        is_chosen_GnE = torch.zeros(*ids_GnK.shape[:2], num_experts, dtype=torch.int32, device=ids_GnK.device)
        is_chosen_GnE = is_chosen_GnE.scatter(2, ids_GnK, 1)
        return is_chosen_GnE.cumsum(1).gather(2, ids_GnK) - 1
    ids_GA = ids_GnK.flatten(1)
    by_score_GA = scores_GnK.flatten(1).sort(dim=1, descending=True, stable=True).indices
    sorted_ids_GA, by_expert_GA = ids_GA.gather(1, by_score_GA).sort(dim=1, stable=True)
    order_GA = by_score_GA.gather(1, by_expert_GA)
    experts_GE = torch.arange(num_experts, device=ids_GA.device).repeat(len(ids_GA), 1)
    starts_GE = torch.searchsorted(sorted_ids_GA, experts_GE)
    places_GA = torch.arange(ids_GA.shape[1], device=ids_GA.device) - starts_GE.gather(1, sorted_ids_GA)
    return torch.zeros_like(places_GA).scatter(1, order_GA, places_GA).view(ids_GnK.shape)
