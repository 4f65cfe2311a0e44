"""The candidates of bench_dispatch.py: all dispatchers, and torchtitan's expert parallelism in its own MoE layer.

T tokens on this rank · D width · K choices · E experts, equally many per rank · P ranks · S rows received · R slots
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from titan_moe.compile import regional
from titan_moe.config.kernels import PRESETS
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.perf import CompileConfig
from titan_moe.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    HierarchicalDispatcher,
    Routed,
    TokenDispatcher,
)
from titan_moe.dispatch.hierarchical import open_node_groups
from titan_moe.kernels.choose import PERMUTE
from titan_moe.layers.forced_routing import ForcedBalance, ForcedSkew
from titan_moe.layers.moe import MoE
from titan_moe.titan import import_torchtitan

PEER = "torchtitan"
DISPATCHERS = ("alltoall", "allgather", "symm_mem", "hierarchical", "hierarchical_symm_mem")
TWO_LEVELS = ("hierarchical", "hierarchical_symm_mem")
"""As if the ranks were on two nodes. With NCCL_P2P_DISABLE=1 collectives are slow, as between nodes, but symmetric
memory is not."""
TILED = "symm_mem_tiles"
"""Fused communication: the experts' GEMMs get rows from peers and put results."""
LAYERS = (*DISPATCHERS, TILED)
CANDIDATES = (*LAYERS, PEER)
ROUTINGS = ("random", "balanced", "skewed", "one_rank_empty", "all_to_one_rank")

DispatchFn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""(rows, expert ids, scores) of this rank -> its differentiable results."""


@dataclass(frozen=True)
class Case:
    """The shape, routing and kernels of a measurement."""

    tokens: int
    width: int
    hidden: int
    experts: int
    choices: int
    routing: str = "random"
    kernels: str = "fused"
    """A preset of `perf.kernels`, for the permute and for the experts of a layer."""

    @property
    def config(self) -> ModelConfig:
        """The configuration of the layer."""
        moe = MoEConfig(num_experts=self.experts, top_k=self.choices, ffn_hidden_size=self.hidden)
        return ModelConfig(hidden_size=self.width, moe=moe)

    @property
    def forward_flops(self) -> float:
        """FLOPs of a rank's experts with balanced ranks."""
        return 6.0 * self.tokens * self.choices * self.width * self.hidden


def draw_choices(case: Case, device: torch.device) -> Tensor:
    """Expert ids [T, K] of this rank. `random` ids differ between ranks; one-sided routings are in units of ranks."""
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
    """Rows and scores of this rank, with requires_grad."""
    generator = torch.Generator(device).manual_seed(100 + dist.get_rank())
    x_TD = torch.randn(case.tokens, case.width, device=device, generator=generator).to(dtype)
    scores_TK = torch.rand(case.tokens, case.choices, device=device, generator=generator)
    return x_TD.requires_grad_(), scores_TK.requires_grad_()


def count_remote_rows(case: Case, ids_TK: Tensor) -> int:
    """The number of rows of this rank for other ranks, once per rank."""
    num_ranks = dist.get_world_size()
    remote_TP = torch.zeros(len(ids_TK), num_ranks, dtype=torch.bool, device=ids_TK.device)
    remote_TP.scatter_(1, ids_TK // (case.experts // num_ranks), True)
    remote_TP[:, dist.get_rank()] = False
    return int(remote_TP.sum())


def build_dispatcher(
    name: str, case: Case, device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> TokenDispatcher:
    """A dispatcher of this package, over the ranks of a group, by default all."""
    group, permute = group or dist.group.WORLD, PERMUTE[PRESETS[case.kernels].permute]
    assert group is not None
    if name == "alltoall":
        return AllToAllDispatcher(case.experts, group, permute)
    if name == "allgather":
        return AllGatherDispatcher(case.experts, group, permute)
    if name in TWO_LEVELS:
        nodes = open_node_groups(group, max(group.size() // 2, 1))
        if name == "hierarchical":
            return HierarchicalDispatcher(case.experts, nodes, permute)
    from titan_moe.dispatch.symm_mem.dispatcher import SymmMemDispatcher
    from titan_moe.dispatch.symm_mem.fused import SymmMemFusedDispatcher
    from titan_moe.dispatch.symm_mem.memory import open_symm_memory
    from titan_moe.kernels.symm_mem.arrays import symm_bytes

    if name == "hierarchical_symm_mem":
        num_tokens = nodes.across.size() * case.tokens
        num_bytes = symm_bytes(nodes.within.size(), num_tokens, case.width, case.choices, dtype)
        memory = open_symm_memory(num_bytes, nodes.within, device)
        return HierarchicalDispatcher(case.experts, nodes, permute, memory=memory)
    num_bytes = symm_bytes(group.size(), case.tokens, case.width, case.choices, dtype)
    kind = SymmMemFusedDispatcher if name == TILED else SymmMemDispatcher
    return kind(case.experts, open_symm_memory(num_bytes, group, device), permute)


def build_dispatch_only(name: str, case: Case, device: torch.device, dtype: torch.dtype) -> DispatchFn:
    """Dispatch and combine, with experts that return their input."""
    if name == PEER:
        return _torchtitan_layer(case, device, scales_rows=False)
    dispatcher = build_dispatcher(name, case, device, dtype)

    def dispatch_and_combine(x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor) -> tuple[Tensor, ...]:
        routed = dispatcher.dispatch(x_TD, ids_TK, scores_TK)
        return dispatcher.combine(routed.x_SD, routed), routed.scores_R  # so that score gradients are sent too

    return dispatch_and_combine


def build_with_stub_experts(name: str, case: Case, device: torch.device, dtype: torch.dtype) -> DispatchFn:
    """Dispatch and combine with stub experts, which scale rows by a factor per expert to make results comparable."""
    if name == PEER:
        return _torchtitan_layer(case, device, scales_rows=True)
    dispatcher = build_dispatcher(name, case, device, dtype)

    def run(x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor) -> tuple[Tensor, ...]:
        routed = dispatcher.dispatch(x_TD, ids_TK, scores_TK)
        factors_e = own_factors(case, device, dist.get_rank(), dist.get_world_size())
        return (dispatcher.combine(stub_experts(routed, factors_e), routed),)

    return run


def build_layer(name: str, case: Case, device: torch.device, dtype: torch.dtype) -> MoE:
    """Our MoE layer with this rank's experts, compiled as in a run."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    with torch.device("meta"):
        layer = MoE(case.config, kernels=PRESETS[case.kernels]).to(dtype)
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
        layer.router.force = FixedChoice(draw_choices(case, device)[None])
    layer.dispatcher = build_dispatcher(name, case, device, dtype)
    regional.apply(layer, CompileConfig(), device)
    return layer


class FixedChoice:
    """Forced routing with fixed expert ids."""

    def __init__(self, ids_BNK: Tensor) -> None:
        self.ids_BNK = ids_BNK

    def __call__(self, logits_BNE: Tensor) -> Tensor:
        return self.ids_BNK


class FixedRouter(nn.Module):
    """A router for torchtitan's layer that returns fixed scores and expert ids."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.scores_TK, self.ids_TK = torch.empty(0), torch.empty(0)

    def forward(self, x_TD: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        counts_E = torch.zeros(self.num_experts, device=x_TD.device)
        return self.scores_TK, self.ids_TK, counts_E  # torchtitan uses the counts only for statistics


class StubExperts(nn.Module):
    """Experts for torchtitan's layer, without weights. They return their rows, scaled by the factors if given."""

    def __init__(self, factors_e: Tensor | None) -> None:
        super().__init__()
        self.factors_e = factors_e

    def forward(self, x_RD: Tensor, counts_e: Tensor) -> Tensor:
        if self.factors_e is None:
            return x_RD
        expert_R = torch.searchsorted(counts_e.cumsum(0), torch.arange(len(x_RD), device=x_RD.device), right=True)
        return x_RD * self.factors_e[expert_R.clamp(max=len(counts_e) - 1), None].to(x_RD.dtype)


def _torchtitan_layer(case: Case, device: torch.device, *, scales_rows: bool) -> DispatchFn:
    """torchtitan's MoE layer: sort, gather, all-to-all, permute, and back. Eager, as in its compiled runs too."""
    titan = import_torchtitan("models.moe.moe")
    args = titan.MoEArgs(num_experts=case.experts, num_shared_experts=0, top_k=case.choices, score_before_experts=False)
    with torch.device("meta"):
        layer = titan.MoE(args, case.width, case.hidden)
    layer.router = router = FixedRouter(case.experts, case.choices)
    factors_e = own_factors(case, device, dist.get_rank(), dist.get_world_size())
    layer.experts = StubExperts(factors_e if scales_rows else None)
    layer.tokens_per_expert, layer.expert_bias = torch.zeros(case.experts, device=device), None
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    import_torchtitan("distributed.expert_parallel").ExpertParallel()._apply(layer.experts, mesh)

    def run(x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor) -> tuple[Tensor, ...]:
        router.scores_TK, router.ids_TK = scores_TK, ids_TK
        return (layer(x_TD[None])[0],)

    return run


def expert_factors(case: Case, device: torch.device) -> Tensor:
    """The factors of all stub experts [E]."""
    return 1 + torch.arange(case.experts, device=device) / case.experts


def own_factors(case: Case, device: torch.device, rank: int, num_ranks: int) -> Tensor:
    """The factors of the stub experts of a rank."""
    return expert_factors(case, device).chunk(num_ranks)[rank]


def stub_experts(routed: Routed, factors_e: Tensor) -> Tensor:
    """Every row times the sum over its slots of score and factor, in plain PyTorch."""
    slots_SK = routed.slots_SK.long().clamp(min=0)
    expert_SK = torch.searchsorted(routed.offsets_e.long(), slots_SK, right=True).clamp(max=len(factors_e) - 1)
    weights_SK = torch.where(routed.slots_SK >= 0, routed.scores_R[slots_SK] * factors_e[expert_SK], 0.0)
    return routed.x_SD * weights_SK.sum(1, keepdim=True).to(routed.x_SD.dtype)
