"""Which experts a token visits, and with what weight.

B batch · N sequence · D width · E experts · K choices a token
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.skew import WINDOW_TOKENS, skewed_counts
from titan_moe.kernels.choose import ROUTE_TOKENS, ROUTER_LOGITS
from titan_moe.kernels.router.routing import RoutingRule
from titan_moe.layers.balance import LoadBalance
from titan_moe.parameters import ParameterKind


class ForcedTable:
    """Benchmarks only: the experts of a table, row by row and round again, whatever the scores say."""

    def __init__(self, table_TK: Tensor) -> None:
        self.table_TK = table_TK

    def __call__(self, logits_BNE: Tensor) -> Tensor:
        """[B, N, E] -> experts [B, N, K]."""
        num_sequences, num_tokens, _ = logits_BNE.shape
        places = torch.arange(num_sequences * num_tokens, device=logits_BNE.device) % len(self.table_TK)
        return self.table_TK[places].unflatten(0, (num_sequences, num_tokens))


class ForcedBalance(ForcedTable):
    """Deal experts out evenly.

    A token takes K neighbours of a shuffled ring of experts, so every E tokens load each expert with K, and a token's
    experts lie on as many ranks as randomly chosen ones would. One ring would send some of 8 ranks a fifth more rows
    than others, though as many choices; with so many, each comes within some percent of the mean.
    """

    NUM_RINGS = 64

    def __init__(self, config: MoEConfig, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_rounds = math.lcm(config.num_experts, config.top_k) // config.num_experts  # until it ends with a token
        rings = [torch.randperm(config.num_experts, generator=generator) for _ in range(self.NUM_RINGS)]
        super().__init__(torch.cat([ring_E.repeat(num_rounds) for ring_E in rings]).view(-1, config.top_k).to(device))


class ForcedSkew(ForcedTable):
    """Load experts and ranks unevenly, as `plan/skew.py` says.

    A token takes K distinct experts, each as often as its load wants (systematic sampling): experts lie on a line, in
    random order, each as long as its count of a window, and a token takes those at K points that are a window apart;
    no expert is longer than that. Every window has its loads exactly, and sixteen orders of experts keep a token's
    company, and so the ranks that its row goes to, as mixed as random choices would.

    All layers have the same table. So the same rank is the busy one in all of them: its activations are the most that
    one rank can have, and no layer makes good what another cost, as could be where the busy rank changed.
    """

    NUM_ORDERS = 16

    def __init__(self, config: MoEConfig, num_ranks: int, device: torch.device, seed: int = 0) -> None:
        """`num_ranks` share the experts, in consecutive pieces."""
        generator = torch.Generator().manual_seed(seed)
        counts_E = torch.tensor(skewed_counts(config.num_experts, config.top_k, num_ranks))
        windows = []
        for _ in range(self.NUM_ORDERS):
            order_E = torch.randperm(config.num_experts, generator=generator)
            line = order_E.repeat_interleave(counts_E[order_E])
            window_TK = line.view(config.top_k, WINDOW_TOKENS).T
            windows.append(window_TK[torch.randperm(WINDOW_TOKENS, generator=generator)])
        super().__init__(torch.cat(windows).to(device))


class TopKRouter(nn.Module):
    """Scores every expert for every token in fp32 and keeps the best K.

    The bias of auxiliary-loss-free balancing (arXiv:2408.15664) takes part in the choice only, never in the weight; it
    is a buffer that the optimizer step moves, and stays zero where it is not used. `force` maps logits to experts that
    are taken whatever the scores say, int64 [B, N, K], or to None, which lets the scores choose.
    """

    parameter_kinds = {"weight": ParameterKind.ROUTER}
    expert_bias_E: Tensor

    def __init__(self, config: ModelConfig, kernels: Kernels = DEFAULT_KERNELS) -> None:
        super().__init__()
        moe = config.moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size))
        self.register_buffer("expert_bias_E", torch.zeros(moe.num_experts, dtype=torch.float32))
        self.rule = RoutingRule(
            moe.score_fn,
            moe.top_k,
            moe.num_groups,
            moe.top_k_groups,
            moe.group_score,
            moe.normalize_topk,
            moe.route_scale,
        )
        self.logits = ROUTER_LOGITS[kernels.router]
        self.route = ROUTE_TOKENS[kernels.router]
        self.force: Callable[[Tensor], Tensor | None] = _leave_free
        self.balance = LoadBalance(moe)

    def reset_buffers(self) -> None:
        """Start without a preference."""
        self.expert_bias_E.zero_()

    def forward(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, D] -> scores fp32 [B·N, K] and expert ids [B·N, K]."""
        logits_BNE = self.logits(x_BND, self.weight)
        routing = self.route(logits_BNE, self.expert_bias_E, self.rule, self.force(logits_BNE))
        return self.balance(routing).flatten(0, 1), routing.topk_ids_BNK.flatten(0, 1)


def _leave_free(logits_BNE: Tensor) -> None:
    """Force no choice."""
