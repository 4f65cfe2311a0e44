"""Plans of expert clones: replica slots, loads, reassigned assignments."""

from itertools import product

import pytest
import torch
from torch import Tensor

from titan_moe.dispatch.clone_plan import ClonePlan, plan_clones, reassign, replica_slots

ROUTINGS = ("random", "steep", "one_hot_expert", "one_full_rank", "one_rank_without_tokens", "nothing")


def draw_counts(
    routing: str, num_ranks: int, num_experts: int, generator: torch.Generator, num_choices: int = 400
) -> Tensor:
    """Counts [P, E] of a routing."""
    weights_E = torch.rand(num_experts, generator=generator) + 0.1
    if routing == "steep":
        weights_E = weights_E**6
    if routing == "one_hot_expert":
        weights_E[int(torch.randint(num_experts, (1,), generator=generator))] = num_experts
    if routing == "one_full_rank":
        weights_E[num_experts // num_ranks :] = 0
    drawn = torch.multinomial(weights_E, num_ranks * num_choices, replacement=True, generator=generator)
    counts_PE = torch.stack([part.bincount(minlength=num_experts) for part in drawn.view(num_ranks, -1)])
    if routing == "one_rank_without_tokens":
        counts_PE[-1] = 0
    return counts_PE * 0 if routing == "nothing" else counts_PE


def loads(counts_PE: Tensor, plan: ClonePlan | None = None) -> Tensor:
    """Number of assignments of each rank, with the clones of a plan."""
    num_ranks, num_experts = counts_PE.shape
    load_P = counts_PE.sum(0).view(num_ranks, -1).sum(1)
    if plan is not None:
        for rank, (experts_c, counts_c) in enumerate(
            zip(plan.experts_Pc.tolist(), plan.counts_Pc.tolist(), strict=True)
        ):
            for expert, taken in zip(experts_c, counts_c, strict=True):
                if expert >= 0:
                    load_P[rank] += taken
                    load_P[expert * num_ranks // num_experts] -= taken
    return load_P


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(1, 4), (2, 8), (4, 8), (8, 64), (5, 20)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_clone_plan_never_raises_the_maximum_load(routing: str, num_ranks: int, num_experts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for num_replicas in (1, 2, 4):
        counts_PE = draw_counts(routing, num_ranks, num_experts, generator)
        plan = plan_clones(counts_PE, num_replicas)
        assert plan.experts_Pc.shape == plan.counts_Pc.shape == (num_ranks, num_replicas)
        assert torch.equal(plan.experts_Pc >= 0, plan.counts_Pc > 0), "a replica slot without assignments has no expert"
        before_P, after_P = loads(counts_PE), loads(counts_PE, plan)
        assert after_P.sum() == before_P.sum() and after_P.max() <= before_P.max()
        moved_E = torch.zeros(num_experts, dtype=torch.int64)
        moved_E.scatter_add_(0, plan.experts_Pc.clamp(min=0).flatten(), plan.counts_Pc.flatten())
        assert (moved_E <= counts_PE.sum(0)).all(), "an expert passes no more assignments than it has"
        for rank, experts_c in enumerate(plan.experts_Pc.tolist()):
            assert all(expert < 0 or expert * num_ranks // num_experts != rank for expert in experts_c), (
                "no clone on the expert's own rank"
            )
        more = loads(counts_PE, plan_clones(counts_PE, num_replicas + 1)).max()
        assert more <= after_P.max(), "another replica slot does not raise the maximum"


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(2, 8), (4, 8), (8, 64), (5, 20)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_reassigned_assignments_of_all_ranks_equal_clone_plan(routing: str, num_ranks: int, num_experts: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for num_replicas in (1, 3):
        counts_PE = draw_counts(routing, num_ranks, num_experts, generator)
        plan = plan_clones(counts_PE, num_replicas)
        moved_PI = torch.zeros(num_ranks, num_ranks * num_replicas, dtype=torch.int64)
        for rank, counts_E in enumerate(counts_PE):
            ids_T1 = torch.arange(num_experts).repeat_interleave(counts_E)[:, None]
            ids_T1 = ids_T1[torch.randperm(len(ids_T1), generator=generator)]
            index_T1 = torch.stack([(ids_T1[:t] == ids_T1[t]).sum() for t in range(len(ids_T1))] or [torch.tensor(0)])
            ids_T1, index_T1 = (
                torch.cat([ids_T1, torch.tensor([[-1]])]),
                torch.cat([index_T1, torch.tensor([0])])[:, None],
            )
            index_T1 = index_T1[: len(ids_T1)]
            slots_T1 = replica_slots(ids_T1, index_T1, reassign(counts_PE, plan, rank, len(ids_T1) + 1))
            assert slots_T1[-1] == -1, "-1 gets no replica slot"
            taken = slots_T1 >= 0
            assert torch.equal(plan.experts_Pc.flatten()[slots_T1[taken]], ids_T1[taken]), (
                "a clone of the assignment's expert"
            )
            moved_PI[rank] = slots_T1[taken].bincount(minlength=num_ranks * num_replicas)
        assert torch.equal(moved_PI.sum(0), plan.counts_Pc.flatten())
        for slot, (expert, taken) in enumerate(zip(plan.experts_Pc.flatten(), plan.counts_Pc.flatten(), strict=True)):
            own_rank = slot // num_replicas
            own = plan.experts_Pc[own_rank] == expert
            if taken > 0 and own.sum() == 1:
                assert moved_PI[own_rank, slot] == min(counts_PE[own_rank, expert], taken), (
                    "assignments of the slot's own rank come first"
                )


def best_max_load(counts_PE: Tensor) -> int:
    """The smallest maximum load with one replica slot a rank, by exhaustive search."""
    num_ranks, num_experts = counts_PE.shape
    load_E, load_P = counts_PE.sum(0).tolist(), loads(counts_PE).tolist()
    per_rank = num_experts // num_ranks

    def suffices(chosen: tuple[int, ...], most: int) -> bool:
        capacity_E = [0] * num_experts
        for rank, expert in enumerate(chosen):
            if expert >= 0:
                capacity_E[expert] += max(most - load_P[rank], 0)
        relief = [min(load, offer) for load, offer in zip(load_E, capacity_E, strict=True)]
        return all(
            load_P[rank] - sum(relief[rank * per_rank : (rank + 1) * per_rank]) <= most for rank in range(num_ranks)
        )

    every = list(product(range(-1, num_experts), repeat=num_ranks))
    low, high = -(-sum(load_P) // num_ranks), max(load_P)
    while low < high:
        middle = (low + high) // 2
        if any(suffices(chosen, middle) for chosen in every):
            high = middle
        else:
            low = middle + 1
    return low


@pytest.mark.parametrize(("num_ranks", "num_experts", "times"), [(2, 8, 1.0), (3, 6, 1.1)])
def test_clone_plan_is_near_the_optimum(num_ranks: int, num_experts: int, times: float) -> None:
    generator = torch.Generator().manual_seed(2)
    for routing in ("random", "steep", "one_hot_expert", "one_full_rank") * 3:
        counts_PE = draw_counts(routing, num_ranks, num_experts, generator)
        assert loads(counts_PE, plan_clones(counts_PE, 1)).max() <= times * best_max_load(counts_PE)


def draw_skewed_counts(generator: torch.Generator) -> Tensor:
    """8 ranks, 128 experts: the busiest expert at 1.5 times the mean or more, the fullest rank at 1.15 to 1.25."""
    while True:
        weights_E = torch.exp(0.25 * torch.randn(128, generator=generator))
        share_P = weights_E.view(8, 16).sum(1)
        if weights_E.max() >= 1.5 * weights_E.mean() and 1.15 <= share_P.max() / share_P.mean() <= 1.25:
            drawn = torch.multinomial(weights_E, 8 * 65_536, replacement=True, generator=generator)
            return torch.stack([part.bincount(minlength=128) for part in drawn.view(8, -1)])


@pytest.mark.parametrize(("num_replicas", "typical", "worst"), [(1, 1.04, 1.08), (2, 1.01, 1.04), (3, 1.003, 1.02)])
def test_clone_plan_balances_skewed_routing(num_replicas: int, typical: float, worst: float) -> None:
    generator = torch.Generator().manual_seed(3)
    max_loads = []
    for _ in range(10):
        counts_PE = draw_skewed_counts(generator)
        load_P = loads(counts_PE, plan_clones(counts_PE, num_replicas)).double()
        max_loads.append(float(load_P.max() / load_P.mean()))
    assert sum(max_loads) / 10 < typical and max(max_loads) < worst, max_loads


def test_clone_plan_spreads_one_hot_expert_over_many_ranks() -> None:
    counts_PE = torch.ones(8, 16, dtype=torch.int64)
    counts_PE[:, 3] = 70
    plan = plan_clones(counts_PE, 1)
    assert (plan.experts_Pc == 3).sum() == 7
    assert loads(counts_PE, plan).max() == loads(counts_PE).sum() // 8


def test_clone_plan_breaks_ties_by_index() -> None:
    counts_PE = torch.full((4, 8), 10)
    counts_PE[:, :4] += 10  # ranks 0 and 1 have equal loads, and ranks 2 and 3
    plan = plan_clones(counts_PE, 1)
    assert plan.experts_Pc.tolist() == [[-1], [-1], [0], [2]]
    assert plan.counts_Pc.tolist() == [[0], [0], [40], [40]]


@pytest.mark.gpu
def test_captured_clone_plan_equals_plan_on_cpu() -> None:
    generator = torch.Generator().manual_seed(4)
    drawn = [(draw_skewed_counts(generator), torch.randint(-1, 128, (4096, 8), generator=generator)) for _ in range(4)]
    index_TK = torch.arange(4096 * 8).view(4096, 8) // 128

    def plan(counts_PE: Tensor, ids_TK: Tensor) -> list[Tensor]:
        planned = plan_clones(counts_PE, 2)
        taken = reassign(counts_PE, planned, 3, ids_TK.numel() + 1)
        return [*planned, replica_slots(ids_TK, index_TK.to(ids_TK.device), taken)]

    counts_PE, ids_TK = (tensor.cuda() for tensor in drawn[0])
    index_TK = index_TK.cuda()
    plan(counts_PE, ids_TK)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = plan(counts_PE, ids_TK)
    for counts, ids in drawn:
        counts_PE.copy_(counts)
        ids_TK.copy_(ids)
        graph.replay()
        for output, expected in zip(outputs, plan(counts, ids), strict=True):
            assert torch.equal(output.cpu(), expected)
