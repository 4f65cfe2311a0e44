"""A choice of experts that several forwards of the same tokens take.

B batch · N sequence · T tokens (B·N) · E experts · K choices a token
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from titan_moe.kernels.router.routing import RouteTokens, Routing, RoutingRule
from titan_moe.layers.dropping import DroppingRoute
from titan_moe.layers.router import TopKRouter


class KeptChoice:
    """Route as another function does, but select the experts that these tokens had in their first forward.

    It takes the place of `TopKRouter.route`. Scores, weights and losses are those of each forward's logits; what is
    selected and counted is that of the first one. So all forwards have the gradients of one choice, also where logits
    differ in their last bits. A first forward finds -1 and writes, the others read, and all run the same operations: a
    compiler makes one graph of them, and the host knows nothing of the ids.
    """

    def __init__(self, route: RouteTokens, ids_TK: Tensor, aux_counts_BE: Tensor, way_out: str = "") -> None:
        """`ids_TK`, int32, and the counts of the balancing loss, int64, are -1 where nothing has been chosen yet, and
        written in place; they may have room for more tokens. With `way_out`, which ends the errors, the object is for
        one forward: a second call, which would be of other tokens, is refused."""
        self.route, self.ids_TK, self.aux_counts_BE, self.way_out = route, ids_TK, aux_counts_BE, way_out
        self.is_spent = False

    def __call__(
        self,
        logits_BNE: Tensor,
        expert_bias_E: Tensor,
        rule: RoutingRule,
        forced_ids_BNK: Tensor | None = None,
        kept_ids_BNK: Tensor | None = None,
    ) -> Routing:
        """Route by the kept ids, and keep them; those that are given, by another choice around this one, come first.

        Raises: ValueError for more tokens or sequences, and for a second call.
        """
        num_sequences, num_tokens = logits_BNE.shape[:2]
        if self.is_spent or num_sequences * num_tokens > len(self.ids_TK) or num_sequences > len(self.aux_counts_BE):
            raise ValueError(self._misfit(num_sequences, num_tokens))
        self.is_spent = bool(self.way_out)
        ids_BNK = self.ids_TK[: num_sequences * num_tokens].view(num_sequences, num_tokens, rule.top_k)
        routing = _route(self.route, ids_BNK, logits_BNE, expert_bias_E, rule, forced_ids_BNK, kept_ids_BNK)
        if not rule.counts_by_score or forced_ids_BNK is not None:  # the loss counts the ids
            return routing
        kept_BE = self.aux_counts_BE[:num_sequences]
        aux_counts_BE = torch.where(kept_BE >= 0, kept_BE, routing.aux_counts_BE)
        kept_BE.copy_(aux_counts_BE)
        return routing._replace(aux_counts_BE=aux_counts_BE)

    def _misfit(self, num_sequences: int, num_tokens: int) -> str:
        room = f"up to {len(self.ids_TK)} tokens of {len(self.aux_counts_BE)} sequences"
        got = "is called twice" if self.is_spent else f"gets {num_tokens} tokens of each of {num_sequences}"
        rule = f"is for a router that is called once, with {room}"
        return f"a kept choice of experts {rule}; this one {got}{self.way_out and '; '}{self.way_out}"


class RecordedChoice:
    """Route as another function does, but select the experts of a record where it has some, and write down the others.

    It takes the place of `TopKRouter.route`. Scores, weights and losses are those of the logits, and the balancing loss
    counts by their scores (router replay, arXiv:2510.11370).
    """

    def __init__(self, route: RouteTokens, ids_BNK: Tensor) -> None:
        """`ids_BNK`, int32, are -1 for tokens whose experts the router chooses, and written in place.

        Raises: ValueError for a router that drops what it chooses.
        """
        if isinstance(route, DroppingRoute):
            raise ValueError(
                f"model.moe.capacity_factor = {route.factor:g} drops assignments, and a record has all experts of a "
                "token; set it to 0 to record or replay them"
            )
        self.route, self.ids_BNK = route, ids_BNK

    def __call__(
        self,
        logits_BNE: Tensor,
        expert_bias_E: Tensor,
        rule: RoutingRule,
        forced_ids_BNK: Tensor | None = None,
        kept_ids_BNK: Tensor | None = None,
    ) -> Routing:
        """Route by the record; those that are given, by another choice around this one, come first.

        Raises: ValueError for tokens of another shape.
        """
        if logits_BNE.shape[:2] != self.ids_BNK.shape[:2]:
            raise ValueError(
                f"experts are replayed for {list(self.ids_BNK.shape[:2])} sequences and tokens, and the router got "
                f"{list(logits_BNE.shape[:2])}; make the replay with the shape of the forward"
            )
        return _route(self.route, self.ids_BNK, logits_BNE, expert_bias_E, rule, forced_ids_BNK, kept_ids_BNK)


def _route(
    route: RouteTokens,
    ids_BNK: Tensor,
    logits_BNE: Tensor,
    expert_bias_E: Tensor,
    rule: RoutingRule,
    forced_ids_BNK: Tensor | None,
    kept_ids_BNK: Tensor | None,
) -> Routing:
    """Select the kept ids, else these, else the forced ones, else the top-k; they are written into these. Ids below -1
    are of dropped assignments (dropping.py)."""
    own_BNK = ids_BNK if kept_ids_BNK is None else torch.where(kept_ids_BNK != -1, kept_ids_BNK, ids_BNK)
    if forced_ids_BNK is None:
        routing = route(logits_BNE, expert_bias_E, rule, None, own_BNK)
    else:
        routing = route(logits_BNE, expert_bias_E, rule, torch.where(own_BNK >= 0, own_BNK, forced_ids_BNK))
    ids_BNK.copy_(routing.topk_ids_BNK)
    return routing


@contextmanager
def routing_by(routers: Iterable[TopKRouter], choices: Iterable[RouteTokens]) -> Iterator[None]:
    """Let each router route by its choice."""
    routed = [(router, router.route, choice) for router, choice in zip(routers, choices, strict=True)]
    try:
        for router, _, choice in routed:
            router.route = choice
        yield
    finally:
        for router, route, _ in routed:
            router.route = route


def nothing_chosen(
    num_sequences: int, num_tokens: int, num_experts: int, top_k: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The ids and counts of a `KeptChoice` before the first forward."""
    ids_TK = torch.full((num_sequences * num_tokens, top_k), -1, dtype=torch.int32, device=device)
    return ids_TK, torch.full((num_sequences, num_experts), -1, dtype=torch.int64, device=device)
