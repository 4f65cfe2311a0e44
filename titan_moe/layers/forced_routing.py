"""Routing that ignores the scores, so that benchmarks can be compared: every expert has a load that is known before.

B batch · N sequence · T tokens (rows of the table) · E experts · K choices a token
"""

import math

import torch
from torch import Tensor, nn

from titan_moe.config.model import MoEConfig
from titan_moe.config.skew import WINDOW_TOKENS, skewed_counts
from titan_moe.layers.router import TopKRouter


class ForcedTable:
    """Take the experts of a table, row after row and round again."""

    def __init__(self, table_TK: Tensor) -> None:
        self.table_TK = table_TK

    def __call__(self, logits_BNE: Tensor) -> Tensor:
        """[B, N, E] -> experts [B, N, K]."""
        num_sequences, num_tokens, _ = logits_BNE.shape
        places = torch.arange(num_sequences * num_tokens, device=logits_BNE.device) % len(self.table_TK)
        return self.table_TK[places].unflatten(0, (num_sequences, num_tokens))


class ForcedBalance(ForcedTable):
    """Load all experts alike.

    A token takes K neighbours of a shuffled ring of experts, so E tokens give each expert K assignments, and a token's
    experts are on as many ranks as random ones. With one ring some of 8 ranks would get a fifth more rows than others,
    though as many assignments; with 64 rings the rows of all ranks are within a few percent.
    """

    NUM_RINGS = 64

    def __init__(self, config: MoEConfig, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_rounds = math.lcm(config.num_experts, config.top_k) // config.num_experts  # until it ends with a token
        rings = [torch.randperm(config.num_experts, generator=generator) for _ in range(self.NUM_RINGS)]
        super().__init__(torch.cat([ring_E.repeat(num_rounds) for ring_E in rings]).view(-1, config.top_k).to(device))


class ForcedSkew(ForcedTable):
    """Load experts and ranks unevenly, by the loads of config/skew.py.

    A token takes K distinct experts, each as often as its load says (systematic sampling). Experts lie on a line, in
    random order, each as long as its count of a window, and a token takes those at K points that are a window apart; no
    expert is longer than that. Every window has exactly these loads. Sixteen orders of experts make the combinations of
    experts in a token, and so the ranks that get its row, as varied as random routing does.

    All layers have the same table, so the same rank is the most loaded in all of them. Its activations are the most
    that a rank can have, and no layer compensates for another.
    """

    NUM_ORDERS = 16

    def __init__(self, config: MoEConfig, num_ranks: int, device: torch.device, seed: int = 0) -> None:
        """`num_ranks` hold the experts, an equal number of consecutive ones each."""
        generator = torch.Generator().manual_seed(seed)
        counts_E = torch.tensor(skewed_counts(config.num_experts, config.top_k, num_ranks))
        windows = []
        for _ in range(self.NUM_ORDERS):
            order_E = torch.randperm(config.num_experts, generator=generator)
            line = order_E.repeat_interleave(counts_E[order_E])
            window_TK = line.view(config.top_k, WINDOW_TOKENS).T
            windows.append(window_TK[torch.randperm(WINDOW_TOKENS, generator=generator)])
        super().__init__(torch.cat(windows).to(device))


def force_routing(model: nn.Module, kind: str, config: MoEConfig, num_ranks: int, device: torch.device) -> None:
    """Force the routing of every layer; `kind` is `balanced` or `skewed`, `num_ranks` hold the experts of a layer."""
    force = ForcedBalance(config, device) if kind == "balanced" else ForcedSkew(config, num_ranks, device)
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.force = force
