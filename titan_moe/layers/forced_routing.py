"""Forced routing: it ignores the scores, so that every expert has a known load.

B batch · N sequence · T tokens (rows of the table) · E experts · K choices a token · S steps of a period
"""

import math
import re
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from titan_moe.config.forced_loads import FORCED_LOADS
from titan_moe.config.model import MoEConfig
from titan_moe.config.skew import WINDOW_TOKENS, skewed_counts
from titan_moe.layers.forced_loads import draw_ids, generator_of
from titan_moe.layers.router import TopKRouter


class ForcedTable:
    """Take the experts of a table, row after row, cyclically."""

    def __init__(self, table_TK: Tensor) -> None:
        self.table_TK = table_TK

    def __call__(self, logits_BNE: Tensor) -> Tensor:
        """[B, N, E] -> experts [B, N, K]."""
        num_sequences, num_tokens, _ = logits_BNE.shape
        places = torch.arange(num_sequences * num_tokens, device=logits_BNE.device) % len(self.table_TK)
        return self.table_TK[places].unflatten(0, (num_sequences, num_tokens))


class ForcedBalance(ForcedTable):
    """Give all experts equal loads.

    A token takes K neighbours of a shuffled ring of experts, so E tokens give each expert K assignments, and a token's
    experts are on as many ranks as random ones. With one ring some of 8 ranks would get a fifth more rows than others,
    though as many assignments; with 64 rings the rows of all ranks are within a few percent.
    """

    NUM_RINGS = 64

    def __init__(self, config: MoEConfig, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_rounds = math.lcm(config.num_experts, config.top_k) // config.num_experts  # until a token ends at its end
        rings = [torch.randperm(config.num_experts, generator=generator) for _ in range(self.NUM_RINGS)]
        super().__init__(torch.cat([ring_E.repeat(num_rounds) for ring_E in rings]).view(-1, config.top_k).to(device))


class ForcedSkew(ForcedTable):
    """Give experts and ranks the uneven loads of config/skew.py.

    A token takes K distinct experts by systematic sampling: experts are intervals on a line, in random order, each as
    long as its count in a window, and a token takes those at K points that are a window apart. No expert is longer than
    a window. Every window has exactly these loads. Sixteen orders make a token's combinations of experts, and so the
    ranks that get its row, as varied as in random routing.

    All layers have the same table, so the same rank is the most loaded in all of them: its activations are the worst
    case, and no layer compensates for another.
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


class ForcedDraws(ForcedTable):
    """Take the experts of a drawn load, from the table of the step.

    The step is read on the device, so that a CUDA graph replays other steps. All ranks draw the same tables, on their
    device.
    """

    NUM_TOKENS = 2048

    def __init__(
        self, load: str, layer: int, config: MoEConfig, num_ranks: int, device: torch.device, step: Tensor
    ) -> None:
        """`layer` counts layers with experts from 0; `step` is an integer on the device."""
        self.num_steps, self.step = FORCED_LOADS[load].period_steps(num_ranks), step
        tables = [
            draw_ids(
                load,
                num_tokens=self.NUM_TOKENS,
                num_experts=config.num_experts,
                top_k=config.top_k,
                num_ranks=num_ranks,
                layer=layer,
                step=number,
                generator=generator_of(0, layer, number, device),
            )
            for number in range(self.num_steps)
        ]
        super().__init__(torch.cat(tables).int())  # int32: a period has many steps

    def __call__(self, logits_BNE: Tensor) -> Tensor:
        num_sequences, num_tokens, _ = logits_BNE.shape
        places = torch.arange(num_sequences * num_tokens, device=logits_BNE.device) % self.NUM_TOKENS
        ids_TK = self.table_TK[places + self.step % self.num_steps * self.NUM_TOKENS]
        return ids_TK.long().unflatten(0, (num_sequences, num_tokens))


def force_load(
    model: nn.Module,
    load: str,
    config: MoEConfig,
    num_ranks: int,
    device: torch.device,
    step: Tensor,
    moe_layers: Sequence[int] = (),
) -> None:
    """Force the load of every layer; `load` is a name of `FORCED_LOADS`, `num_ranks` is ep.

    Layers of a load that changes over steps share its tables; other loads differ by a layer's place among `moe_layers`.
    """

    @cache
    def force_of(layer: int) -> ForcedTable:
        if load == "balanced":
            return ForcedBalance(config, device)
        if load == "skewed":
            return ForcedSkew(config, num_ranks, device)
        return ForcedDraws(load, layer, config, num_ranks, device, step)

    shares_tables = load in ("balanced", "skewed") or FORCED_LOADS[load].follows_step != ""
    for name, module in model.named_modules():
        if isinstance(module, TopKRouter):
            layer = _layer_of(name)
            place = moe_layers.index(layer) if layer in moe_layers else layer
            module.force = force_of(0 if shares_tables else place)


def _layer_of(name: str) -> int:
    """The number of a layer in the name of its router, `layers.3.feed_forward.router`; 0 for a name without one."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else 0
