"""Warn of layers whose routing has collapsed: nearly every token chooses the same experts."""

import logging
from collections import Counter

from titan_moe.config.model import MoEConfig

logger = logging.getLogger("titan_moe")

SHARE_OF_TOKENS = 0.9
"""A layer has collapsed if its busiest expert has at least this share of the tokens: a load of 0.9 E / K."""
NUM_LOGGED_STEPS = 5
"""Consecutive logged steps before a warning. In the first steps of a run a layer may collapse and recover."""


class CollapseWarning:
    """Warn once of each layer: one that recovers often collapses again."""

    def __init__(self, moe: MoEConfig) -> None:
        self.largest_load = moe.num_experts / moe.top_k
        # from K = E / 2 on, a balanced expert already has half of the tokens
        self.is_possible = moe.num_experts >= 2 * moe.top_k
        self.num_steps: Counter[str] = Counter()
        self.warned: set[str] = set()

    def see(self, step: int, expert_loads: dict[str, float]) -> None:
        """Take the loads of a logged step, by layer."""
        for layer, load in expert_loads.items():
            if not self.is_possible or load < SHARE_OF_TOKENS * self.largest_load:
                del self.num_steps[layer]
                continue
            self.num_steps[layer] += 1
            if self.num_steps[layer] == NUM_LOGGED_STEPS and layer not in self.warned:
                self.warned.add(layer)
                logger.warning(
                    "%s has collapsed: at step %d and in the %d logged steps before, its busiest expert had %.1f times "
                    "the mean load (%.1f is every token); raise model.moe.aux_loss_coef or lower optim.lr, and for a "
                    "new run raise model.embedding_init_std (model.embedding_multiplier if embeddings are tied)",
                    layer,
                    step,
                    NUM_LOGGED_STEPS - 1,
                    load,
                    self.largest_load,
                )
