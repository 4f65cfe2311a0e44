"""Several GPUs of one node: rows over symmetric memory arrive as over NCCL, run after run, launched and replayed; with
experts that get rows themselves and an arena too."""

import pytest
import torch
import torch.distributed as dist
from support.gpus import NUM_GPUS, needs_gpus, take_gpu
from torch import Tensor

from titan_moe.dispatch import AllToAllDispatcher, TokenDispatcher
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.symm_mem.dispatcher import SymmMemDispatcher
from titan_moe.dispatch.symm_mem.fused import SymmMemFusedDispatcher
from titan_moe.dispatch.symm_mem.memory import SymmMemory, close_symm_memory, open_symm_memory
from titan_moe.kernels.choose import PERMUTE, choose_expert_mlp
from titan_moe.kernels.experts.arena import Arena
from titan_moe.kernels.symm_mem.arrays import symm_bytes
from titan_moe.layers.experts import GroupedExperts
from titan_moe.plan.cost.loads import LayerLoads, visit_probability

pytestmark = [pytest.mark.gpu, needs_gpus]

NUM_TOKENS, WIDTH, HIDDEN, NUM_EXPERTS, TOP_K = 512, 256, 128, 16, 4
NUM_LAYERS = 2
ROUTINGS = ("random", "balanced", "skewed", "one_rank_empty", "all_to_one_rank", "dropped_choices")


def choose(routing: str, num_ranks: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Expert ids [T, K] of this rank."""
    num_local = NUM_EXPERTS // num_ranks
    if routing == "balanced":
        return torch.arange(NUM_TOKENS * TOP_K, device=device).view(NUM_TOKENS, TOP_K) % NUM_EXPERTS
    scores_TE = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator, device=device)
    if routing == "skewed":
        scores_TE[:, : num_local // 2 + 1] += 0.6
    ids_TK = scores_TE.topk(TOP_K).indices
    if routing == "one_rank_empty":
        ids_TK = torch.where(ids_TK >= NUM_EXPERTS - num_local, -1, ids_TK)
    if routing == "all_to_one_rank":  # to the last, as many choices as it has experts
        ids_TK = torch.where(ids_TK.argsort(-1) < num_local, NUM_EXPERTS - 1 - ids_TK.argsort(-1), -1)
    if routing == "dropped_choices":
        ids_TK = torch.where(torch.rand(ids_TK.shape, generator=generator, device=device) < 0.3, -1, ids_TK)
    return ids_TK


def draw(number: int, num_ranks: int, device: torch.device) -> list[Tensor]:
    """Rows, ids, scores and a gradient of one plan on this rank."""
    generator = torch.Generator(device).manual_seed(100 * number + dist.get_rank())
    x_TD, grad_TD = torch.randn(2, NUM_TOKENS, WIDTH, generator=generator, device=device).bfloat16()
    ids_TK = choose(ROUTINGS[number % len(ROUTINGS)], num_ranks, generator, device)
    scores_TK = torch.rand(NUM_TOKENS, TOP_K, generator=generator, device=device)
    return [x_TD, ids_TK, scores_TK, grad_TD]


def built(num_ranks: int, device: torch.device, kernels: str = "grouped_mm") -> GroupedExperts:
    """This rank's share of experts that are the same wherever they are drawn."""
    module = GroupedExperts(NUM_EXPERTS, WIDTH, HIDDEN, choose_expert_mlp(kernels, "activation")).to(device)
    generator = torch.Generator(device).manual_seed(3)
    for parameter in module.parameters():
        whole = torch.randn(parameter.shape, generator=generator, device=device) / 16
        parameter.data = whole.bfloat16().chunk(num_ranks)[dist.get_rank()].clone()
    return module


def serve(dispatcher: TokenDispatcher, module: GroupedExperts, given: list[Tensor]) -> list[Tensor]:
    """Two layers, so that memory is used again before either has its backward: output and all gradients."""
    x_TD, ids_TK, scores_TK, grad_TD = given
    x_TD, scores_TK = x_TD.detach().requires_grad_(), scores_TK.detach().requires_grad_()
    dispatcher.capacity.start_forward()
    h_TD = x_TD
    for _ in range(NUM_LAYERS):
        routed = dispatcher.dispatch(h_TD, ids_TK, scores_TK)
        h_TD = h_TD + dispatcher.combine(module(routed), routed)
    return [h_TD.detach(), *torch.autograd.grad(h_TD, (x_TD, scores_TK, module.gate_up, module.down), grad_TD)]


def with_arena(memory: SymmMemory, num_ranks: int, device: torch.device, overlaps: bool) -> SymmMemFusedDispatcher:
    """A dispatcher whose experts get rows themselves, with room for the worst case of all layers in its arena."""
    capacity = ExpertCapacity(float(num_ranks * TOP_K), device)
    num_local, worst = NUM_EXPERTS // num_ranks, num_ranks * NUM_TOKENS
    rows = worst * visit_probability(NUM_EXPERTS, num_local, TOP_K)
    loads = LayerLoads(NUM_LAYERS, rows, NUM_TOKENS * TOP_K, worst, worst * min(TOP_K, num_local))
    capacity.use_arena(Arena(WIDTH, HIDDEN, torch.bfloat16, device), loads)
    return SymmMemFusedDispatcher(NUM_EXPERTS, memory, PERMUTE["triton"], capacity, overlaps=overlaps)


def poison(dispatcher: TokenDispatcher) -> None:
    """What is not written into an arena must not be read."""
    if (arena := dispatcher.capacity.arena) is not None:
        arena.rows_AW.fill_(float("nan"))
        arena.hidden_BH.fill_(float("nan"))


def compare(num_plans: int, arena: str = "none") -> dict[str, list[int]]:
    """The plans whose results are not those of NCCL, not those of a second run, not those of a replayed graph.

    `arena`: `none` for rows that are sent before the experts run; `after` and `tile` for experts that get rows
    themselves, with an arena, without and with overlap.
    """
    num_ranks, device = dist.get_world_size(), take_gpu()
    group = dist.new_group(backend="nccl")
    memory = open_symm_memory(symm_bytes(num_ranks, NUM_TOKENS, WIDTH, TOP_K, torch.bfloat16), group, device)
    dispatcher: TokenDispatcher = SymmMemDispatcher(NUM_EXPERTS, memory)
    if arena != "none":
        dispatcher = with_arena(memory, num_ranks, device, overlaps=arena == "tile")
    module = built(num_ranks, device, "grouped_mm" if arena == "none" else "fused")
    other = AllToAllDispatcher(NUM_EXPERTS, group)
    static = draw(0, num_ranks, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            serve(dispatcher, module, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured = serve(dispatcher, module, static)
    wrong: dict[str, list[int]] = {"alltoall": [], "again": [], "replayed": []}
    for number in range(num_plans):
        given = draw(number, num_ranks, device)
        launched = []
        for _ in range(2):
            poison(dispatcher)
            launched.append(serve(dispatcher, module, given))
        first, second = launched
        for target, source in zip(static, given, strict=True):
            target.copy_(source)
        poison(dispatcher)
        graph.replay()
        for name, results in {"again": second, "replayed": captured}.items():
            if not all(torch.equal(a, b) for a, b in zip(first, results, strict=True)):
                wrong[name].append(number)
        expected = serve(other, module, given)
        if not all((a - b).norm() <= 1e-2 * b.norm() for a, b in zip(first, expected, strict=True)):
            wrong["alltoall"].append(number)
    assert not dispatcher.capacity.invalidates_step, "everything has room"
    graph.reset()
    close_symm_memory(group)
    dist.destroy_process_group(group)
    return wrong


COUNTS = [n for n in (2, 4, 8) if n <= NUM_GPUS] or [2]


@pytest.mark.parametrize("num_ranks", COUNTS)
def test_a_thousand_plans_arrive_as_over_nccl(ranks, num_ranks: int) -> None:
    assert ranks(num_ranks, compare, 1000) == [{"alltoall": [], "again": [], "replayed": []}] * num_ranks


@pytest.mark.parametrize("num_ranks", COUNTS)
@pytest.mark.parametrize("arena", ["after", "tile"])
def test_experts_that_get_rows_into_an_arena_replay_what_is_launched(ranks, num_ranks: int, arena: str) -> None:
    answers = ranks(num_ranks, compare, 50 * len(ROUTINGS), arena)
    assert answers == [{"alltoall": [], "again": [], "replayed": []}] * num_ranks
