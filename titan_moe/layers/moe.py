"""The mixture-of-experts layer (arXiv:1701.06538), dropless.

B batch · N sequence · T tokens (B·N) · t tokens of a chunk · D model width · L latent width · K choices a token
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.model import ModelConfig
from titan_moe.dispatch.base import Exchange, InFlight, TokenDispatcher
from titan_moe.dispatch.local import LocalDispatcher
from titan_moe.kernels.expert_mlp import choose_expert_mlp
from titan_moe.kernels.slots import choose_lay_out
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.mlp import MLP, GatedMLP, NoMLP
from titan_moe.layers.router import TopKRouter

Underway = tuple[InFlight, Exchange]
"""What travels for a chunk of tokens, and what its dispatcher remembers of it."""


class MoE(nn.Module):
    """Send each token to its best experts and add their weighted results, and the shared experts'.

    What a layer does not have is an object that does nothing: no latent is `nn.Identity`, no shared expert is a sum of
    one, no expert parallelism is a `LocalDispatcher`. Where experts live on other ranks, another dispatcher sits in
    `dispatcher`.

    `forward` is `send`, `serve` and `collect`; each hands the next what it needs, messages in flight among it. With
    `num_chunks`, a batch's tokens travel in as many messages, and the rows of one under the experts of another.

    Example:
        >>> import torch
        >>> from titan_moe.config.model import ModelConfig, MoEConfig
        >>> config = ModelConfig(hidden_size=64, moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=32))
        >>> layer = MoE(config)
        >>> _ = [torch.nn.init.normal_(p, std=0.02) for p in layer.parameters()]
        >>> layer(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
    """

    def __init__(self, config: ModelConfig, kernels: Kernels = DEFAULT_KERNELS) -> None:
        super().__init__()
        moe, width = config.moe, config.moe.latent_size or config.hidden_size
        self.router = TopKRouter(config, kernels)
        self.dispatcher: TokenDispatcher = LocalDispatcher(moe.num_experts, choose_lay_out(kernels.slots))
        mlp = choose_expert_mlp(kernels.experts, moe.score_on)
        self.experts = GroupedExperts(moe.num_experts, width, moe.ffn_hidden_size, mlp)
        self.shared_experts = _shared_experts(config, kernels)
        self.num_chunks = 1
        self.sum: Callable[[Tensor, Any], Tensor] = torch.add if moe.shared_ffn_hidden_size else _of_one
        self.latent_down = nn.Linear(config.hidden_size, width, bias=False) if moe.latent_size else nn.Identity()
        self.latent_up = nn.Linear(width, config.hidden_size, bias=False) if moe.latent_size else nn.Identity()

    def forward(self, x_BND: Tensor) -> Tensor:
        """[B, N, D] -> [B, N, D]."""
        return self.collect(*self.serve(*self.send(x_BND))).unflatten(0, x_BND.shape[:2])

    def send(self, x_BND: Tensor) -> tuple[Tensor, list[Underway]]:
        """Choose experts and send the rows on their way to them."""
        x_TD = x_BND.flatten(0, 1)
        topk_scores_TK, topk_ids_TK = self.router(x_BND)  # sees sequences: per-sequence balance needs them
        x_TL = self.latent_down(x_TD)
        chunks = zip(*(_chunks(whole, self.num_chunks) for whole in (x_TL, topk_ids_TK, topk_scores_TK)), strict=True)
        sent = []
        for x_tL, ids_tK, scores_tK in chunks:
            exchange = self.dispatcher.prepare(ids_tK, scores_tK)
            sent.append((self.dispatcher.start_send(x_tL, exchange), exchange))
        return x_TD, sent

    def serve(self, x_TD: Tensor, sent: list[Underway]) -> tuple[Any, list[Underway]]:
        """Serve the rows that arrive and send the results on their way home."""
        served = []
        for message, exchange in sent:
            # first, so that in backward the rows' gradients have left when the weights' are computed
            ready = self.experts.make_ready()
            routed = self.dispatcher.receive(message, exchange)
            served.append((self.dispatcher.send_back(self.experts(routed, ready), routed.exchange), routed.exchange))
        return self.shared_experts(x_TD), served  # shared experts while results may still travel

    def collect(self, shared_TD: Any, served: list[Underway]) -> Tensor:
        """Add up the results that come home: -> [T, D]."""
        chunks = [self.dispatcher.reduce(y, exchange) for y, exchange in served]
        y_TL = torch.cat(chunks) if len(chunks) > 1 else chunks[0]
        return self.sum(self.latent_up(y_TL), shared_TD)


def _chunks(whole: Tensor, number: int) -> Sequence[Tensor]:
    return whole.chunk(number) if number > 1 else [whole]


def _of_one(y_TD: Tensor, _: None) -> Tensor:
    return y_TD


def _shared_experts(config: ModelConfig, kernels: Kernels) -> nn.Module:
    moe = config.moe
    if not moe.shared_ffn_hidden_size:
        return NoMLP()
    shared = GatedMLP if moe.shared_expert_gate else MLP
    return shared(config.hidden_size, moe.shared_ffn_hidden_size, kernels)
