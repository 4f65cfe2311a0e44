"""Rows once a node, then once a rank: what is sent over each level of links, numerics, and both halves under way.

tests/dispatch/test_equal_local.py compares values and gradients of all routings with a dense computation.
"""

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import load
from torch import Tensor
from torch._C._distributed_c10d import _get_work_registry_size
from torch.utils.checkpoint import checkpoint

from titan_moe.dispatch import AllToAllDispatcher, HierarchicalDispatcher
from titan_moe.dispatch.async_collectives import ASYNC
from titan_moe.dispatch.hierarchical import open_node_groups

equal_local = load("dispatch/test_equal_local")
NUM_EXPERTS, WIDTH = equal_local.NUM_EXPERTS, equal_local.WIDTH
CASES = [
    *((2, 2, routing) for routing in ("skewed", "one_rank_empty", "dropped_choices", "one_node")),
    pytest.param(2, 4, "skewed", marks=pytest.mark.slow),
    pytest.param(4, 2, "skewed", marks=pytest.mark.slow),
]
"""Nodes, ranks of each, routing."""


def draw(routing: str, num_ranks: int, tokens_by_rank: list[int]) -> list[tuple[Tensor, ...]]:
    """As `inputs` of test_equal_local.py; with "one_node" all experts of a token are in the same half of them."""
    drawn = equal_local.inputs("random" if routing == "one_node" else routing, num_ranks, tokens_by_rank)
    if routing != "one_node":
        return drawn
    half, generator = NUM_EXPERTS // 2, torch.Generator().manual_seed(1)
    of_half = [torch.rand(len(x), half, generator=generator).topk(equal_local.TOP_K).indices for x, *_ in drawn]
    nodes = [torch.randint(2, (len(x), 1), generator=generator) for x, *_ in drawn]
    return [(x, ids + half * node, *rest) for (x, _, *rest), ids, node in zip(drawn, of_half, nodes, strict=True)]


def my_experts() -> Any:
    per_rank = NUM_EXPERTS // dist.get_world_size()
    return equal_local.experts(dist.get_rank() * per_rank, (dist.get_rank() + 1) * per_rank)


def serve_and_count(routing: str, tokens_by_rank: list[int], ranks_per_node: int) -> tuple[list[Tensor], list[Any]]:
    """Results; and of every all-to-all of rows, with those in backward, the rows to each global rank."""
    dispatcher = HierarchicalDispatcher(NUM_EXPERTS, open_node_groups(dist.group.WORLD, ranks_per_node))
    sent: list[dict[int, int]] = []
    all_to_all = dist.all_to_all_single

    def counted(out: Tensor, x: Tensor, received: list[int], splits: list[int], group: dist.ProcessGroup) -> None:
        if x.ndim == 2 and x.shape[1] == WIDTH:
            sent.append(dict(zip(dist.get_process_group_ranks(group), splits, strict=True)))
        all_to_all(out, x, received, splits, group=group)

    mine = draw(routing, dist.get_world_size(), tokens_by_rank)[dist.get_rank()]
    with mock.patch.object(dist, "all_to_all_single", counted):
        results = equal_local.serve(dispatcher, my_experts(), mine)
    return results, sent


def needed(drawn: list[tuple[Tensor, ...]], ranks_per_node: int) -> tuple[dict[Any, int], dict[Any, int]]:
    """The fewest rows from rank to rank, by brute force: across nodes, and from the ranks that they come to."""
    num_ranks = len(drawn)
    per_rank, across, within = NUM_EXPERTS // num_ranks, {}, {}
    for source, (_, ids_TK, *_) in enumerate(drawn):
        index = source % ranks_per_node
        for ids in ids_TK.tolist():
            targets = {expert // per_rank for expert in ids if expert >= 0}
            for node in {target // ranks_per_node for target in targets}:
                link = source, node * ranks_per_node + index
                across[link] = across.get(link, 0) + 1
            for target in targets:
                link = target // ranks_per_node * ranks_per_node + index, target
                within[link] = within.get(link, 0) + 1
    return across, within


def links_of(counts: list[dict[int, int]]) -> dict[Any, int]:
    """Rows by (from, to), without zeros."""
    return {(source, to): n for source, sent in enumerate(counts) for to, n in sent.items() if n}


@pytest.mark.parametrize(("num_nodes", "ranks_per_node", "routing"), CASES)
def test_rows_cross_once_a_node_and_the_results_are_exact(
    ranks, num_nodes: int, ranks_per_node: int, routing: str
) -> None:
    num_ranks = num_nodes * ranks_per_node
    tokens_by_rank = [5, 0, 13, 1, 2, 0, 3, 9][:num_ranks]
    drawn = draw(routing, num_ranks, tokens_by_rank)
    answers = ranks(num_ranks, serve_and_count, routing, tokens_by_rank, ranks_per_node)
    actual = equal_local.join([results for results, _ in answers], experts_add_up=False)
    expected = equal_local.join([equal_local.dense_oracle(of_rank) for of_rank in drawn], experts_add_up=True)
    equal_local.assert_close(actual, expected)
    across, within = needed(drawn, ranks_per_node)
    back, back_within = ({(to, source): n for (source, to), n in links.items()} for links in (across, within))
    # dispatch and combine, then the backward of combine and of dispatch
    expected_links = [across, within, back_within, back, across, within, back_within, back]
    assert [links_of(list(step)) for step in zip(*(sent for _, sent in answers), strict=True)] == expected_links
    if routing == "one_node":
        assert sum(across.values()) == sum(tokens_by_rank) < sum(within.values())


def combine_in_bf16(ranks_per_node: int) -> tuple[Tensor, Tensor]:
    """What comes back of bf16 rows that experts multiply by the score of each slot, and the partial results."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x_TD, ids_TK, scores_TK, _ = draw("random", num_ranks, [equal_local.NUM_TOKENS] * num_ranks)[rank]
    x_TD, scores_TK, per_rank = x_TD.bfloat16(), scores_TK.float(), NUM_EXPERTS // num_ranks
    dispatcher = HierarchicalDispatcher(NUM_EXPERTS, open_node_groups(dist.group.WORLD, ranks_per_node))
    routed = dispatcher.dispatch(x_TD, ids_TK, scores_TK)
    weights_SK = torch.where(routed.slots_SK >= 0, routed.scores_R[routed.slots_SK.clamp(min=0)], 0)
    y_TD = dispatcher.combine((routed.x_SD.float() * weights_SK.sum(1, keepdim=True)).bfloat16(), routed)
    on_rank_TKP = ids_TK[:, :, None] // per_rank == torch.arange(num_ranks)
    weights_TP = (scores_TK[:, :, None] * on_rank_TKP).sum(1)
    return y_TD, (x_TD.float()[:, None] * weights_TP[:, :, None]).bfloat16()


def test_a_node_sums_in_fp32_and_rounds_once(ranks) -> None:
    differ_from_one_sum = 0
    for y_TD, partial_TPD in ranks(4, combine_in_bf16, 2):
        of_nodes_TMD = partial_TPD.unflatten(1, (2, 2)).float().sum(2).bfloat16()
        assert torch.equal(y_TD, of_nodes_TMD.float().sum(1).bfloat16())
        differ_from_one_sum += int((y_TD != partial_TPD.float().sum(1).bfloat16()).sum())
    assert differ_from_one_sum > 0, "or this case does not show the rounding"


def run_pending(routing: str, is_recomputed: bool) -> tuple[list[bool], int]:
    """Whether asynchronous results have the bits of synchronous ones; the number of collectives without a wait."""
    mine = draw(routing, 4, [5, 0, 13, 1])[dist.get_rank()]
    groups = open_node_groups(dist.group.WORLD, 2)
    dispatcher, pending = (HierarchicalDispatcher(NUM_EXPERTS, groups, **how) for how in ({}, {"collectives": ASYNC}))
    module = my_experts()
    expected = equal_local.serve(dispatcher, module, mine)
    x_TD, ids_TK, scores_TK, grad_TD = mine
    leaves = [x_TD.clone().requires_grad_(), scores_TK.clone().requires_grad_()]
    module.zero_grad()

    def layer(x_TD: Tensor, scores_TK: Tensor) -> Tensor:
        exchange = pending.prepare(ids_TK, scores_TK)
        started = pending.start_dispatch(x_TD, exchange)
        x_TD.cos()  # what is computed meanwhile
        routed = pending.finish_dispatch(started, exchange)
        back = pending.start_combine(module(routed), routed.exchange)
        return pending.finish_combine(back, routed.exchange)

    y_TD = checkpoint(layer, *leaves, use_reentrant=False) if is_recomputed else layer(*leaves)
    y_TD.backward(grad_TD)
    actual = [y_TD.detach(), *(leaf.grad for leaf in leaves), module.gate_up.grad, module.down.grad]
    return [torch.equal(a, b) for a, b in zip(actual, expected, strict=True)], _get_work_registry_size()


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["once", "recomputed"])
def test_halves_that_overlap_have_the_same_bits(ranks, is_recomputed: bool) -> None:
    for routing in ("random", "one_rank_empty", "one_node"):
        assert ranks(4, run_pending, routing, is_recomputed) == [([True] * 5, 0)] * 4


def nodes_of_folded_groups() -> list[list[int]]:
    """The groups of this rank, for ep groups of half the ranks; another pair of them is opened first."""
    world = dist.get_world_size()
    halves = [dist.new_group(list(range(first, first + world // 2))) for first in (0, world // 2)]
    mine = halves[dist.get_rank() * 2 // world]
    pairs = [open_node_groups(mine, 2) for _ in range(2)]
    assert all(a is not b for a, b in pairwise(group for pair in pairs for group in pair))
    return [dist.get_process_group_ranks(group) for group in pairs[1]]


@pytest.mark.slow
def test_nodes_of_two_ep_groups(ranks) -> None:
    assert ranks(8, nodes_of_folded_groups) == [
        [[rank % 2 + 4 * (rank // 4) + 2 * node for node in range(2)], [rank // 2 * 2, rank // 2 * 2 + 1]]
        for rank in range(8)
    ]


def host_reads() -> int:
    """How often the counts of a layer are read by the host."""
    dispatcher = HierarchicalDispatcher(NUM_EXPERTS, open_node_groups(dist.group.WORLD, 2))
    mine = draw("random", 4, [5, 0, 13, 1])[dist.get_rank()]
    reads = []
    tolist = Tensor.tolist
    with mock.patch.object(Tensor, "tolist", lambda x: reads.append(x) or tolist(x)):
        routed = dispatcher.dispatch(*mine[:3])
        dispatcher.combine(routed.x_SD, routed)
    return len(reads)


def test_the_host_reads_counts_once_a_layer(ranks) -> None:
    assert ranks(4, host_reads) == [1] * 4


def row_order() -> bool:
    """Whether rows arrive by the rank that forwards them, then by node, then by token."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    ids_TK = torch.zeros(3, 1, dtype=torch.int64) + torch.arange(3)[:, None] * 2 % NUM_EXPERTS
    x_TD = (100.0 * rank + torch.arange(3.0))[:, None].expand(3, WIDTH)
    args = x_TD, ids_TK, torch.ones(3, 1)
    hierarchical = HierarchicalDispatcher(NUM_EXPERTS, open_node_groups(dist.group.WORLD, 2)).dispatch(*args)
    plain = AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD).dispatch(*args)
    sources = [100.0 * source for index in range(2) for source in range(index, num_ranks, 2)]
    expected = [source + token for source in sources for token in range(3) if int(ids_TK[token, 0]) // 2 == rank]
    assert sorted(expected) == plain.x_SD[:, 0].tolist()
    return hierarchical.x_SD[:, 0].tolist() == expected


def test_rows_arrive_in_a_fixed_order(ranks) -> None:
    assert ranks(4, row_order) == [True] * 4
