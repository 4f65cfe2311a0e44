"""What bench_dispatch.py compares: every dispatcher of ours, and torchtitan's expert parallelism in its own MoE layer.

T tokens on this rank · D width · K choices · E experts, as many on every rank · P ranks · S rows received · R slots
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from titan_moe.compile import regional
from titan_moe.config.kernels import PRESETS
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.perf import CompileConfig
from titan_moe.dispatch import AllGatherDispatcher, AllToAllDispatcher, Routed, TokenDispatcher
from titan_moe.kernels.choose import PERMUTE
from titan_moe.layers.forced_routing import ForcedBalance, ForcedSkew
from titan_moe.layers.moe import MoE
from titan_moe.titan import import_torchtitan

PEER = "torchtitan"
DISPATCHERS = ("alltoall", "allgather", "symm_mem")
TILED = "symm_mem_tiles"
"""A layer whose experts fetch rows and deliver results themselves."""
LAYERS = (*DISPATCHERS, TILED)
CANDIDATES = (*LAYERS, PEER)
ROUTINGS = ("random", "balanced", "skewed", "one_rank_empty", "all_to_one_rank")

Serve = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""Rows, choices and scores of this rank -> results, the differentiable ones of them."""


@dataclass(frozen=True)
class Case:
    """What is sent, and with which kernels."""

    tokens: int
    width: int
    hidden: int
    experts: int
    choices: int
    routing: str = "random"
    kernels: str = "fused"
    """A preset of the recipe's `perf.kernels`: who sorts slots, and serves experts in a layer."""

    @property
    def config(self) -> ModelConfig:
        """The layer."""
        moe = MoEConfig(num_experts=self.experts, top_k=self.choices, ffn_hidden_size=self.hidden)
        return ModelConfig(hidden_size=self.width, moe=moe)

    @property
    def forward_flops(self) -> float:
        """Of a rank's experts, where all ranks have equally many slots."""
        return 6.0 * self.tokens * self.choices * self.width * self.hidden


def draw_choices(case: Case, device: torch.device) -> Tensor:
    """Expert ids [T, K] of this rank; those of `random` differ by rank, and those that are empty or full are whole
    ranks."""
    num_ranks, moe = dist.get_world_size(), case.config.moe
    if case.routing in ("balanced", "skewed"):
        force = ForcedBalance(moe, device) if case.routing == "balanced" else ForcedSkew(moe, num_ranks, device)
        return force(torch.empty(1, case.tokens, case.experts, device=device))[0]
    per_rank = case.experts // num_ranks
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    scores_TE = torch.rand(case.tokens, case.experts, device=device, generator=generator)
    if case.routing == "one_rank_empty":
        scores_TE[:, -per_rank:] = -1
    if case.routing == "all_to_one_rank":
        scores_TE[:, per_rank:] = -1
    return scores_TE.topk(case.choices).indices


def draw_rows(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and scores of this rank, to be differentiated."""
    generator = torch.Generator(device).manual_seed(100 + dist.get_rank())
    x_TD = torch.randn(case.tokens, case.width, device=device, generator=generator).to(dtype)
    scores_TK = torch.rand(case.tokens, case.choices, device=device, generator=generator)
    return x_TD.requires_grad_(), scores_TK.requires_grad_()


def count_remote_rows(case: Case, ids_TK: Tensor) -> int:
    """Rows of this rank that other ranks want, each once a rank."""
    num_ranks = dist.get_world_size()
    wanted_TP = torch.zeros(len(ids_TK), num_ranks, dtype=torch.bool, device=ids_TK.device)
    wanted_TP.scatter_(1, ids_TK // (case.experts // num_ranks), True)
    wanted_TP[:, dist.get_rank()] = False
    return int(wanted_TP.sum())


def build_dispatcher(name: str, case: Case, device: torch.device, dtype: torch.dtype) -> TokenDispatcher:
    """One of ours over all ranks."""
    group, permute = dist.group.WORLD, PERMUTE[PRESETS[case.kernels].permute]
    assert group is not None
    if name == "alltoall":
        return AllToAllDispatcher(case.experts, group, permute)
    if name == "allgather":
        return AllGatherDispatcher(case.experts, group, permute)
    from titan_moe.dispatch.symm_mem import SymmMemDispatcher, open_symm_memory
    from titan_moe.dispatch.symm_mem_fused import SymmMemFusedDispatcher
    from titan_moe.kernels.symm_mem.arrays import symm_bytes

    num_bytes = symm_bytes(group.size(), case.tokens, case.width, case.choices, dtype)
    kind = SymmMemFusedDispatcher if name == TILED else SymmMemDispatcher
    return kind(case.experts, open_symm_memory(num_bytes, group, device), permute)


def build_mover(name: str, case: Case, device: torch.device, dtype: torch.dtype) -> Serve:
    """Send rows and bring them back as they came: nothing but dispatch and combine."""
    if name == PEER:
        return _torchtitan_layer(case, device, standing_in=False)
    dispatcher = build_dispatcher(name, case, device, dtype)

    def move(x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor) -> tuple[Tensor, ...]:
        routed = dispatcher.dispatch(x_TD, ids_TK, scores_TK)
        return dispatcher.combine(routed.x_SD, routed), routed.scores_R  # so that their gradients go home too

    return move


def build_server(name: str, case: Case, device: torch.device, dtype: torch.dtype) -> Serve:
    """Send rows to stand-ins of experts, each of which multiplies by a number of its own: results can be compared."""
    if name == PEER:
        return _torchtitan_layer(case, device, standing_in=True)
    dispatcher = build_dispatcher(name, case, device, dtype)

    def serve(x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor) -> tuple[Tensor, ...]:
        routed = dispatcher.dispatch(x_TD, ids_TK, scores_TK)
        return (dispatcher.combine(_stand_in(routed, case), routed),)

    return serve


def build_layer(name: str, case: Case, device: torch.device, dtype: torch.dtype) -> MoE:
    """Our MoE layer with this rank's experts, compiled in the pieces that a run compiles."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    with torch.device("meta"):
        layer = MoE(case.config, PRESETS[case.kernels]).to(dtype)
    for parameter in layer.experts.parameters():
        parameter.data = parameter.data.chunk(num_ranks)[rank]
    layer.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in layer.parameters():
        drawn = torch.randn(parameter.shape, device=device, generator=generator)
        parameter.data.copy_(drawn / parameter.shape[-1] ** 0.5)
    layer.router.reset_buffers()
    layer.router.balance.reset_buffers()
    if case.routing != "random":
        layer.router.force = Given(draw_choices(case, device)[None])
    layer.dispatcher = build_dispatcher(name, case, device, dtype)
    regional.apply(layer, CompileConfig(), device)
    return layer


class Given:
    """A choice that was made before, whatever the scores say."""

    def __init__(self, ids_BNK: Tensor) -> None:
        self.ids_BNK = ids_BNK

    def __call__(self, logits_BNE: Tensor) -> Tensor:
        return self.ids_BNK


class GivenRouter(nn.Module):
    """torchtitan's router, which has made its choice."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.scores_TK, self.ids_TK = torch.empty(0), torch.empty(0)

    def forward(self, x_TD: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        counts_E = torch.zeros(self.num_experts, device=x_TD.device)
        return self.scores_TK, self.ids_TK, counts_E  # the counts are for its statistics


class StandIns(nn.Module):
    """torchtitan's experts of a rank, without weights: they return their rows, or these times their numbers."""

    def __init__(self, numbers_e: Tensor | None) -> None:
        super().__init__()
        self.numbers_e = numbers_e

    def forward(self, x_RD: Tensor, counts_e: Tensor) -> Tensor:
        if self.numbers_e is None:
            return x_RD
        expert_R = torch.searchsorted(counts_e.cumsum(0), torch.arange(len(x_RD), device=x_RD.device), right=True)
        return x_RD * self.numbers_e[expert_R.clamp(max=len(counts_e) - 1), None].to(x_RD.dtype)


def _torchtitan_layer(case: Case, device: torch.device, *, standing_in: bool) -> Serve:
    """Its MoE layer as it runs, eager around its experts also where it compiles: sort, gather, exchange, permute, and
    all of it back."""
    titan = import_torchtitan("models.moe.moe")
    args = titan.MoEArgs(num_experts=case.experts, num_shared_experts=0, top_k=case.choices, score_before_experts=False)
    with torch.device("meta"):
        layer = titan.MoE(args, case.width, case.hidden)
    layer.router = router = GivenRouter(case.experts, case.choices)
    layer.experts = StandIns(_numbers(case, device) if standing_in else None)
    layer.tokens_per_expert, layer.expert_bias = torch.zeros(case.experts, device=device), None
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    import_torchtitan("distributed.expert_parallel").ExpertParallel()._apply(layer.experts, mesh)

    def serve(x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor) -> tuple[Tensor, ...]:
        router.scores_TK, router.ids_TK = scores_TK, ids_TK
        return (layer(x_TD[None])[0],)

    return serve


def _numbers(case: Case, device: torch.device) -> Tensor:
    """What this rank's stand-ins multiply by."""
    return (1 + torch.arange(case.experts, device=device) / case.experts).chunk(dist.get_world_size())[dist.get_rank()]


def _stand_in(routed: Routed, case: Case) -> Tensor:
    """Every row times the scores and numbers of those who want it, in plain operations."""
    numbers_e: Any = _numbers(case, routed.x_SD.device)
    slots_SK = routed.slots_SK.long().clamp(min=0)
    expert_SK = torch.searchsorted(routed.offsets_e.long(), slots_SK, right=True).clamp(max=len(numbers_e) - 1)
    weights_SK = torch.where(routed.slots_SK >= 0, routed.scores_R[slots_SK] * numbers_e[expert_SK], 0.0)
    return routed.x_SD * weights_SK.sum(1, keepdim=True).to(routed.x_SD.dtype)
