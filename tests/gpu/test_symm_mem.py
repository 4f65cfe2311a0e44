"""Several GPUs of one node: rows over symmetric memory arrive as over NCCL, run after run, launched and replayed."""

import pytest
import torch
import torch.distributed as dist
from support.gpus import NUM_GPUS, needs_gpus, take_gpu
from torch import Tensor

from titan_moe.dispatch import AllToAllDispatcher, TokenDispatcher
from titan_moe.dispatch.symm_mem import SymmMemDispatcher
from titan_moe.dispatch.symm_memory import close_symm_memory, open_symm_memory
from titan_moe.kernels.symm_mem.arrays import symm_bytes
from titan_moe.layers.experts import GroupedExperts

pytestmark = [pytest.mark.gpu, needs_gpus]

NUM_TOKENS, WIDTH, HIDDEN, NUM_EXPERTS, TOP_K = 512, 256, 128, 16, 4
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


def built(num_ranks: int, device: torch.device) -> GroupedExperts:
    """This rank's share of experts that are the same wherever they are drawn."""
    module = GroupedExperts(NUM_EXPERTS, WIDTH, HIDDEN).to(device)
    generator = torch.Generator(device).manual_seed(3)
    for parameter in module.parameters():
        whole = torch.randn(parameter.shape, generator=generator, device=device) / 16
        parameter.data = whole.bfloat16().chunk(num_ranks)[dist.get_rank()].clone()
    return module


def serve(dispatcher: TokenDispatcher, module: GroupedExperts, given: list[Tensor]) -> list[Tensor]:
    """Two layers, so that memory is used again before either has its backward: output and all gradients."""
    x_TD, ids_TK, scores_TK, grad_TD = given
    x_TD, scores_TK = x_TD.detach().requires_grad_(), scores_TK.detach().requires_grad_()
    h_TD = x_TD
    for _ in range(2):
        routed = dispatcher.dispatch(h_TD, ids_TK, scores_TK)
        h_TD = h_TD + dispatcher.combine(module(routed), routed)
    return [h_TD.detach(), *torch.autograd.grad(h_TD, (x_TD, scores_TK, module.gate_up, module.down), grad_TD)]


def compare(num_plans: int) -> dict[str, list[int]]:
    """The plans whose results are not those of NCCL, not those of a second run, not those of a replayed graph."""
    num_ranks, device = dist.get_world_size(), take_gpu()
    group = dist.new_group(backend="nccl")
    memory = open_symm_memory(symm_bytes(num_ranks, NUM_TOKENS, WIDTH, TOP_K, torch.bfloat16), group, device)
    dispatcher = SymmMemDispatcher(NUM_EXPERTS, memory)
    module = built(num_ranks, device)
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
        first, second = (serve(dispatcher, module, given) for _ in range(2))
        for target, source in zip(static, given, strict=True):
            target.copy_(source)
        graph.replay()
        for name, results in {"again": second, "replayed": captured}.items():
            if not all(torch.equal(a, b) for a, b in zip(first, results, strict=True)):
                wrong[name].append(number)
        expected = serve(other, module, given)
        if not all((a - b).norm() <= 1e-2 * b.norm() for a, b in zip(first, expected, strict=True)):
            wrong["alltoall"].append(number)
    graph.reset()
    close_symm_memory(group)
    dist.destroy_process_group(group)
    return wrong


COUNTS = [n for n in (2, 4, 8) if n <= NUM_GPUS] or [2]


@pytest.mark.parametrize("num_ranks", COUNTS)
def test_a_thousand_plans_arrive_as_over_nccl(ranks, num_ranks: int) -> None:
    assert ranks(num_ranks, compare, 1000) == [{"alltoall": [], "again": [], "replayed": []}] * num_ranks
