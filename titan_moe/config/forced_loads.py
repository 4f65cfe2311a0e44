"""Loads of experts and ranks that can replace the router's selection, by name, without torch.

P ep ranks, each with E/P consecutive experts · K choices a token

A drawn load isolates one difficulty of expert parallelism. Most are workloads of Megatron-LM's token-imbalance
benchmark (pull request 7488), whose names are in brackets. layers/forced_loads.py draws the expert ids.
"""

from dataclasses import dataclass
from typing import Literal

HEAT = 16.0
DRIFT_STEPS = 16
BURST_STEPS = 8

NO_LOAD = "none"
"""The router selects."""


@dataclass(frozen=True)
class ForcedLoad:
    """Facts about a load."""

    purpose: str  # one line; printed by `--explain`
    fewest_ranks: Literal["all", "half", "one"] = "all"
    """The ranks whose experts get all tokens, in the layer and the step with fewest."""
    reaches_all_tokens: bool = True
    """Whether every token has experts; a router gives every token some."""
    follows_step: Literal["", "drift", "burst"] = ""
    """How it changes over steps."""

    def period_steps(self, num_ranks: int) -> int:
        """Steps after which it repeats."""
        return {"": 1, "drift": DRIFT_STEPS * num_ranks, "burst": BURST_STEPS * num_ranks}[self.follows_step]

    def num_experts_in_use(self, num_experts: int, num_ranks: int) -> int:
        """Experts that get tokens, in the layer and the step with fewest."""
        used = {"all": num_ranks, "half": (num_ranks + 1) // 2, "one": 1}[self.fewest_ranks]
        return num_experts // num_ranks * used


DRAWN_LOADS = {
    "uniform": ForcedLoad("every expert is as likely (W0)."),
    "hot_expert": ForcedLoad(f"one expert is {HEAT:g} times as likely as another (W1)."),
    "hot_rank": ForcedLoad("the experts of one rank are (W2)."),
    "spread_hot_experts": ForcedLoad("one expert of each rank is (W3)."),
    "ragged_sources": ForcedLoad(
        "uniform, but each rank has another number of tokens with experts (W4).", reaches_all_tokens=False
    ),
    "cold_ranks": ForcedLoad("half of the ranks get nothing (W5).", fewest_ranks="half"),
    "drifting": ForcedLoad(
        f"the hot rank moves to the next one within {DRIFT_STEPS} steps (W6).", follows_step="drift"
    ),
    "bursts": ForcedLoad(
        f"uniform, but at every {BURST_STEPS}th step everything is routed to one rank (W7).",
        fewest_ranks="one",
        follows_step="burst",
    ),
    "alternating": ForcedLoad("the hot rank is another one in each layer; the sum over layers is even."),
    "one_rank": ForcedLoad(
        "everything is routed to one rank, in all layers and at all steps: the worst case.", fewest_ranks="one"
    ),
    "one_rank_in_one_layer": ForcedLoad(
        "everything is routed to one rank in the first layer with experts; the others are uniform.", fewest_ranks="one"
    ),
    "collapsed": ForcedLoad("every token has the first K experts, in all layers: a router that has collapsed."),
}
"""By name."""

FORCED_LOADS = {
    NO_LOAD: ForcedLoad("the router selects."),
    "balanced": ForcedLoad("all experts have equal loads, so that runs are comparable."),
    "skewed": ForcedLoad(
        "fixed loads, equal in all layers: the most loaded expert has 1.8 times the mean load, the most loaded ep rank "
        "1.2 times."
    ),
    **{name: load for name, load in DRAWN_LOADS.items() if load.reaches_all_tokens},
}
"""By the value of `train.forced_load`."""
