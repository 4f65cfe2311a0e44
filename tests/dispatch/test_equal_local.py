"""Every dispatcher equals a dense computation in one process: values and gradients, in fp64, for all routings."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from titan_moe.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    CloningDispatcher,
    ExpertTensorDispatcher,
    HierarchicalDispatcher,
    LocalDispatcher,
    TokenDispatcher,
)
from titan_moe.dispatch.clones.weights import CollectiveCloneWeights
from titan_moe.dispatch.hierarchical import open_node_groups
from titan_moe.kernels.choose import choose_expert_mlp
from titan_moe.kernels.permute.permutation import Permutation, sort_by_expert
from titan_moe.layers.experts import GroupedExperts

NUM_EXPERTS, TOP_K, NUM_TOKENS, WIDTH, HIDDEN = 8, 3, 12, 16, 16
ROUTINGS = ("random", "skewed", "one_expert_empty", "one_rank_empty", "all_to_one_rank", "dropped_choices")


def hierarchical(num_experts: int, group: dist.ProcessGroup, **options: Any) -> HierarchicalDispatcher:
    """Of two nodes, where there are several ranks."""
    return HierarchicalDispatcher(num_experts, open_node_groups(group, max(group.size() // 2, 1)), **options)


KINDS = {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher, "hierarchical": hierarchical}


def choose(routing: str, num_tokens: int, num_ranks: int, generator: torch.Generator) -> Tensor:
    """Expert ids [T, K] of one rank."""
    scores_TE = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    per_rank = NUM_EXPERTS // num_ranks
    if routing == "skewed":
        scores_TE[:, 1] += 0.8
    if routing == "one_expert_empty":
        scores_TE[:, 3] = -1
    if routing == "one_rank_empty" and num_ranks > 1 and NUM_EXPERTS - per_rank >= TOP_K:
        scores_TE[:, -per_rank:] = -1
    ids_TK = scores_TE.topk(TOP_K).indices
    if routing == "all_to_one_rank":  # to all experts of rank 0, the rest is -1
        ids_TK = torch.where(ids_TK.argsort(-1) < per_rank, ids_TK.argsort(-1), -1)
    if routing == "dropped_choices":
        ids_TK = torch.where(torch.rand(num_tokens, TOP_K, generator=generator) < 0.3, -1, ids_TK)
    return ids_TK


def inputs(routing: str, num_ranks: int, tokens_by_rank: list[int]) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Rows, ids, scores and a gradient for each rank, equal on every rank that draws them."""
    generator = torch.Generator().manual_seed(7)
    drawn = []
    for num_tokens in tokens_by_rank:
        x_TD = torch.randn(num_tokens, WIDTH, generator=generator, dtype=torch.float64)
        ids_TK = choose(routing, num_tokens, num_ranks, generator)
        scores_TK = torch.rand(num_tokens, TOP_K, generator=generator, dtype=torch.float64)
        drawn.append((x_TD, ids_TK, scores_TK, torch.randn(x_TD.shape, generator=generator, dtype=torch.float64)))
    return drawn


def experts(first: int, last: int, *, has_bias: bool = False) -> GroupedExperts:
    generator = torch.Generator().manual_seed(3)
    mlp = choose_expert_mlp("reference", "activation")
    module = GroupedExperts(NUM_EXPERTS, WIDTH, HIDDEN, mlp, has_bias=has_bias).double()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)[first:last].clone()
    return module


def serve(dispatcher: TokenDispatcher, module: GroupedExperts, rank_inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients of rows, scores and expert weights."""
    x_TD, ids_TK, scores_TK, grad_TD = rank_inputs
    x_TD, scores_TK = x_TD.clone().requires_grad_(), scores_TK.clone().requires_grad_()
    routed = dispatcher.dispatch(x_TD, ids_TK, scores_TK)
    y_TD = dispatcher.combine(module(routed), routed)
    y_TD.backward(grad_TD)
    return [y_TD.detach(), x_TD.grad, scores_TK.grad, *(parameter.grad for parameter in module.parameters())]


def dense_oracle(rank_inputs: tuple[Tensor, ...], *, has_bias: bool = False) -> list[Tensor]:
    """Every token through every expert in plain torch, without dispatchers and kernels."""
    x_TD, ids_TK, scores_TK, grad_TD = rank_inputs
    module = experts(0, NUM_EXPERTS, has_bias=has_bias)
    x_TD, scores_TK = x_TD.clone().requires_grad_(), scores_TK.clone().requires_grad_()
    y_TD = torch.zeros_like(x_TD)
    for expert in range(NUM_EXPERTS):
        gate, up = (x_TD @ w_FD.T for w_FD in module.gate_up[expert])
        weight_T1 = (scores_TK * (ids_TK == expert)).sum(1, keepdim=True)
        if has_bias:
            gate, up = gate + module.gate_up_bias[expert, 0], up + module.gate_up_bias[expert, 1]
            y_TD = y_TD + weight_T1 * module.down_bias[expert]
        y_TD = y_TD + weight_T1 * ((torch.nn.functional.silu(gate) * up) @ module.down[expert].T)
    y_TD.backward(grad_TD)
    return [y_TD.detach(), x_TD.grad, scores_TK.grad, *(parameter.grad for parameter in module.parameters())]


def run_rank(kind: str, routing: str, tokens_by_rank: list[int]) -> list[Tensor]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    per_rank = NUM_EXPERTS // num_ranks
    module = experts(rank * per_rank, (rank + 1) * per_rank)
    dispatcher = KINDS[kind](NUM_EXPERTS, dist.group.WORLD)
    return serve(dispatcher, module, inputs(routing, num_ranks, tokens_by_rank)[rank])


def run_cloning_rank(kind: str, routing: str, tokens_by_rank: list[int], num_replicas: int) -> tuple[list[Tensor], int]:
    """Results with clones, and the number of assignments of all ranks that clones got."""
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    inner = KINDS[kind](NUM_EXPERTS + num_ranks * num_replicas, group)
    dispatcher = CloningDispatcher(inner, NUM_EXPERTS, num_replicas, group)
    assert dispatcher.facts is inner.facts
    per_rank = NUM_EXPERTS // num_ranks
    module = experts(rank * per_rank, (rank + 1) * per_rank)
    module.transforms["clones"] = CollectiveCloneWeights(group)
    rank_inputs = inputs(routing, num_ranks, tokens_by_rank)[rank]
    offsets_e = dispatcher.dispatch(*rank_inputs[:3]).offsets_e
    num_taken = offsets_e[-1] - offsets_e[per_rank - 1]
    dist.all_reduce(num_taken)
    return serve(dispatcher, module, rank_inputs), int(num_taken)


def run_expert_tensor_rank(kind: str, routing: str, num_ep: int, num_etp: int) -> list[Tensor]:
    """Results of a rank, with the gradients of its part of F."""
    mesh = init_device_mesh("cpu", (num_ep, num_etp), mesh_dim_names=("ep", "etp"))
    ep_rank, etp_rank, num_experts = *mesh.get_coordinate(), NUM_EXPERTS // num_ep
    module = experts(ep_rank * num_experts, (ep_rank + 1) * num_experts)
    for parameter in module.parameters():
        parameter.data = parameter.data.chunk(num_etp, 2)[etp_rank].clone()
    inner = KINDS[kind](NUM_EXPERTS, mesh["ep"].get_group()) if kind != "local" else LocalDispatcher(NUM_EXPERTS)
    dispatcher = ExpertTensorDispatcher(inner, mesh["etp"].get_group())
    assert dispatcher.facts is inner.facts
    num_ranks = num_ep * num_etp
    return serve(dispatcher, module, inputs(routing, num_ranks, [NUM_TOKENS] * num_ranks)[dist.get_rank()])


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for name, a, b in zip(("y", "dx", "dscores", "dgate_up", "ddown"), actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def join(parts: list[list[Tensor]], *, experts_add_up: bool) -> list[Tensor]:
    rows = [torch.cat(tensors) for tensors in list(zip(*parts, strict=True))[:3]]
    weights = list(zip(*parts, strict=True))[3:]
    return rows + [torch.stack(w).sum(0) if experts_add_up else torch.cat(w) for w in weights]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_local_dispatcher_equals_dense_oracle(routing: str) -> None:
    (rank_inputs,) = inputs(routing, 1, [NUM_TOKENS])
    actual = serve(LocalDispatcher(NUM_EXPERTS), experts(0, NUM_EXPERTS), rank_inputs)
    assert_close(actual, dense_oracle(rank_inputs))


@pytest.mark.few("2-allgather", "2-alltoall", "2-hierarchical", "8-allgather", "8-alltoall", "8-hierarchical")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_collective_dispatchers_equal_dense_oracle(ranks, kind: str, num_ranks: int) -> None:
    for routing in ROUTINGS:
        tokens_by_rank = [NUM_TOKENS] * num_ranks
        actual = join(ranks(num_ranks, run_rank, kind, routing, tokens_by_rank), experts_add_up=False)
        expected = [dense_oracle(drawn) for drawn in inputs(routing, num_ranks, tokens_by_rank)]
        assert_close(actual, join(expected, experts_add_up=True))


@pytest.mark.few(
    "2-4-allgather", "2-4-alltoall", "2-4-hierarchical", "4-2-allgather", "4-2-alltoall", "4-2-hierarchical"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(2, 1), (2, 4), (4, 1), (4, 2)])
def test_cloning_dispatcher_equals_dense_oracle(ranks, kind: str, num_ranks: int, num_replicas: int) -> None:
    num_taken = {}
    for routing in ROUTINGS:
        tokens_by_rank = [NUM_TOKENS] * num_ranks if kind == "allgather" else [5, 0, 2 * NUM_TOKENS, 1][-num_ranks:]
        results, taken = zip(
            *ranks(num_ranks, run_cloning_rank, kind, routing, tokens_by_rank, num_replicas), strict=True
        )
        expected = [dense_oracle(drawn) for drawn in inputs(routing, num_ranks, tokens_by_rank)]
        assert_close(join(list(results), experts_add_up=False), join(expected, experts_add_up=True))
        num_taken[routing] = taken[0]
    assert num_taken["skewed"] > 0 and num_taken["all_to_one_rank"] > 0, num_taken


@pytest.mark.parametrize("kind", ["alltoall", "hierarchical"])
def test_all_to_all_with_uneven_and_no_tokens_equals_dense_oracle(ranks, kind: str) -> None:
    for tokens_by_rank in ([5, 0, 13, 1], [0, 0, 0, 7], [0, 0, 0, 0]):
        actual = join(ranks(4, run_rank, kind, "random", tokens_by_rank), experts_add_up=False)
        expected = [dense_oracle(drawn) for drawn in inputs("random", 4, tokens_by_rank)]
        assert_close(actual, join(expected, experts_add_up=True))


def permute_last_row_first(ids_SK: Tensor, scores_SK: Tensor, num_experts: int, num_slots: int) -> Permutation:
    """A user's permute: the last row first."""
    slots = sort_by_expert(ids_SK.flip(0), scores_SK.flip(0), num_experts, num_slots)
    return slots._replace(rows_R=len(ids_SK) - 1 - slots.rows_R, slots_SK=slots.slots_SK.flip(0))


def run_both_permutes(kind: str) -> tuple[list[Tensor], list[Tensor], bool]:
    """Results of both permutes, and whether their slots are in different orders."""
    rank, is_local = dist.get_rank(), kind == "local"
    rank_inputs = inputs("random", 2, [NUM_TOKENS] * 2)[rank]
    module = experts(0, NUM_EXPERTS) if is_local else experts(rank * NUM_EXPERTS // 2, (rank + 1) * NUM_EXPERTS // 2)
    build = partial(LocalDispatcher, NUM_EXPERTS) if is_local else partial(KINDS[kind], NUM_EXPERTS, dist.group.WORLD)
    results, orders = [], []
    for dispatcher in (build(), build(permute=permute_last_row_first)):
        module.zero_grad()
        results.append(serve(dispatcher, module, rank_inputs))
        orders.append(dispatcher.dispatch(*rank_inputs[:3]).rows_R)
    return *results, not torch.equal(*orders)


@pytest.mark.parametrize("kind", ["local", *KINDS])
def test_dispatchers_use_the_given_permute(ranks, kind: str) -> None:
    for default, reversed_rows, differ in ranks(2, run_both_permutes, kind):
        assert differ
        assert_close(reversed_rows, default)


def count_rows(routing: str) -> tuple[int, int]:
    """Number of rows sent, and number of different (token, rank) pairs."""
    rank = dist.get_rank()
    _, ids_TK, scores_TK, _ = inputs(routing, 4, [NUM_TOKENS] * 4)[rank]
    exchange = AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD).prepare(ids_TK, scores_TK)
    return sum(exchange.copies.rows_sent), len(
        {(t, i // 2) for t, ids in enumerate(ids_TK.tolist()) for i in ids if i >= 0}
    )


def test_alltoall_sends_a_row_once_a_rank(ranks) -> None:
    for num_sent, num_pairs in ranks(4, count_rows, "skewed"):
        assert num_sent == num_pairs < NUM_TOKENS * TOP_K


@pytest.mark.parametrize(("kind", "num_ep", "num_etp"), [("local", 1, 4), ("allgather", 2, 2), ("alltoall", 2, 2)])
def test_expert_tensor_dispatcher_equals_dense_oracle(ranks, kind: str, num_ep: int, num_etp: int) -> None:
    num_ranks = num_ep * num_etp
    for routing in ROUTINGS:
        parts = ranks(num_ranks, run_expert_tensor_rank, kind, routing, num_ep, num_etp)
        rows = [torch.cat(tensors) for tensors in list(zip(*parts, strict=True))[:3]]
        by_ep = [parts[first : first + num_etp] for first in range(0, num_ranks, num_etp)]
        weights = [
            torch.cat([torch.cat([part[number] for part in etp_group], dim=2) for etp_group in by_ep])
            for number in (3, 4)
        ]
        expected = [dense_oracle(drawn) for drawn in inputs(routing, num_ranks, [NUM_TOKENS] * num_ranks)]
        assert_close(rows + weights, join(expected, experts_add_up=True))
