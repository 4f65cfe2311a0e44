"""Plans of expert clones, and the assignments that they get."""

from itertools import product

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.clones.plan import TOLERANCE, ClonePlan, launch_plan, plan_clones, plan_clones_reference
from titan_moe.kernels.clones.reassign import reassign, reassign_reference
from titan_moe.kernels.permute.permutation import sort_by_expert

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


def moved(counts_PE: Tensor, num_replicas: int, cost: int = 0) -> tuple[Tensor, Tensor]:
    """The experts in the replica slots, and how many assignments of all ranks each slot gets: [P, c]."""
    plans = [plan_clones_reference(counts_PE, num_replicas, rank, cost) for rank in range(len(counts_PE))]
    assert all(torch.equal(plan.experts_Pc, plans[0].experts_Pc) for plan in plans), "all ranks plan alike"
    moved_I = torch.stack([plan.ends_I - plan.begins_I for plan in plans]).sum(0)
    return plans[0].experts_Pc, moved_I.view(-1, num_replicas)


def loads(counts_PE: Tensor, num_replicas: int = 0) -> Tensor:
    """Number of assignments of each rank, with clones if there are replica slots."""
    num_ranks, num_experts = counts_PE.shape
    load_P = counts_PE.sum(0).view(num_ranks, -1).sum(1)
    if num_replicas:
        experts_Pc, moved_Pc = moved(counts_PE, num_replicas)
        for rank in range(num_ranks):
            for expert, number in zip(experts_Pc[rank].tolist(), moved_Pc[rank].tolist(), strict=True):
                load_P[rank] += number
                load_P[expert * num_ranks // num_experts] -= number
    return load_P


def limit(counts_PE: Tensor) -> float:
    """The load of a rank below which no more is moved."""
    mean = -(-int(counts_PE.sum()) // len(counts_PE))
    return mean + mean // TOLERANCE


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(1, 4), (2, 8), (4, 8), (8, 64), (5, 20)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_clones_never_raise_the_maximum_load(routing: str, num_ranks: int, num_experts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for num_replicas in (1, 2, 4):
        counts_PE = draw_counts(routing, num_ranks, num_experts, generator)
        experts_Pc, moved_Pc = moved(counts_PE, num_replicas)
        assert torch.equal(experts_Pc >= 0, moved_Pc > 0), "a replica slot without assignments has no expert"
        before_P, after_P = loads(counts_PE), loads(counts_PE, num_replicas)
        assert after_P.sum() == before_P.sum() and after_P.max() <= before_P.max()
        moved_E = torch.zeros(num_experts, dtype=torch.int64)
        moved_E.scatter_add_(0, experts_Pc.clamp(min=0).flatten(), moved_Pc.flatten())
        assert (moved_E <= counts_PE.sum(0)).all(), "an expert passes no more assignments than it has"
        for rank, experts_c in enumerate(experts_Pc.tolist()):
            experts = [expert for expert in experts_c if expert >= 0]
            assert all(expert * num_ranks // num_experts != rank for expert in experts), "no clone on its own rank"
            assert len(set(experts)) == len(experts), "no expert is cloned twice onto a rank"
        if before_P.max() <= limit(counts_PE):
            assert (experts_Pc < 0).all(), "a balanced exchange has no clones"
        more = loads(counts_PE, num_replicas + 1).max()
        assert more <= max(after_P.max(), limit(counts_PE)), "another replica slot does not raise the maximum"


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(2, 8), (4, 8), (8, 64), (5, 20)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_reassigned_assignments_are_served_by_their_experts(routing: str, num_ranks: int, num_experts: int) -> None:
    generator = torch.Generator().manual_seed(1)
    num_own = num_experts // num_ranks
    for num_replicas in (1, 3):
        counts_PE = draw_counts(routing, num_ranks, num_experts, generator)
        served_P = torch.zeros(num_ranks, dtype=torch.int64)
        for rank, counts_E in enumerate(counts_PE):
            ids_T1 = torch.cat([torch.arange(num_experts).repeat_interleave(counts_E), torch.tensor([-1])])
            ids_T1 = ids_T1[torch.randperm(len(ids_T1), generator=generator)][:, None]
            plan = plan_clones_reference(counts_PE, num_replicas, rank)
            new_T1 = reassigned(ids_T1, num_experts, plan)
            assert torch.equal(new_T1 < 0, ids_T1 < 0)
            ids, new = ids_T1[ids_T1 >= 0], new_T1[ids_T1 >= 0]
            there, local = new // (num_own + num_replicas), new % (num_own + num_replicas)
            experts = torch.where(
                local < num_own, there * num_own + local, plan.experts_Pc[there, (local - num_own).clamp(min=0)]
            )
            assert torch.equal(experts, ids)
            served_P += there.bincount(minlength=num_ranks)
        assert torch.equal(served_P, loads(counts_PE, num_replicas))


def reassigned(ids_TK: Tensor, num_experts: int, plan: ClonePlan) -> Tensor:
    slots = sort_by_expert(ids_TK, torch.zeros(ids_TK.shape, device=ids_TK.device), num_experts, ids_TK.numel())
    op = reassign if ids_TK.is_cuda else reassign_reference
    return op(ids_TK, slots.slots_SK, slots.offsets_e, *plan)


@pytest.mark.parametrize(("cost", "expected"), [(0, 3), (9, 3), (10, 2), (39, 2), (40, 1), (74, 1), (75, 0)])
def test_an_expert_is_cloned_while_its_rank_exceeds_the_mean_by_more_than_a_clone_costs(
    cost: int, expected: int
) -> None:
    """The first has 75 more than the mean of 100, and the others have room for 35, 30 and 10 of these."""
    counts_PE = torch.zeros(4, 4, dtype=torch.int64)
    counts_PE[1] = torch.tensor([175, 65, 70, 90])
    experts_Pc, moved_Pc = moved(counts_PE, 1, cost)
    assert experts_Pc.flatten().tolist() == [-1, *[0] * expected, *[-1] * (3 - expected)]
    assert moved_Pc.flatten().tolist() == [0, *[35, 30, 10][:expected], *[0] * (3 - expected)]


def test_clones_get_assignments_of_their_own_rank_first() -> None:
    counts_PE = torch.ones(4, 8, dtype=torch.int64)
    counts_PE[:, 0] = 100  # of rank 0, whose own come last
    experts_Pc, moved_Pc = moved(counts_PE, 1)
    assert experts_Pc.tolist() == [[-1], [0], [0], [0]] and moved_Pc.tolist() == [[0], [99], [99], [99]]
    for rank, own in ((0, 0), (1, 99), (2, 98), (3, 97)):
        plan = plan_clones_reference(counts_PE, 1, rank)
        assert int(plan.ends_I[rank] - plan.begins_I[rank]) == own


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
def test_plan_is_near_the_optimum(num_ranks: int, num_experts: int, times: float) -> None:
    generator = torch.Generator().manual_seed(2)
    for routing in ("random", "steep", "one_hot_expert", "one_full_rank") * 3:
        counts_PE = draw_counts(routing, num_ranks, num_experts, generator)
        assert loads(counts_PE, 1).max() <= max(times * best_max_load(counts_PE), limit(counts_PE))


def draw_skewed_counts(generator: torch.Generator, num_ranks: int = 8, spread: float = 0.25) -> Tensor:
    """128 experts of log-normal popularity."""
    weights_E = torch.exp(spread * torch.randn(128, generator=generator))
    drawn = torch.multinomial(weights_E, num_ranks * 65_536, replacement=True, generator=generator)
    return torch.stack([part.bincount(minlength=128) for part in drawn.view(num_ranks, -1)])


@pytest.mark.parametrize(("num_replicas", "worst"), [(1, 1.15), (2, 1.08), (4, 1.05)])
def test_plan_balances_skewed_routing(num_replicas: int, worst: float) -> None:
    """Ranks at up to 2 times the mean come down to a twentieth above it; 2 replica slots suffice nearly always."""
    generator = torch.Generator().manual_seed(3)
    before, after = [], []
    for num_ranks, spread in product((2, 4, 8), (0.25, 0.5, 1.0)):
        counts_PE = draw_skewed_counts(generator, num_ranks, spread)
        for found, replicas in ((before, 0), (after, num_replicas)):
            load_P = loads(counts_PE, replicas).double()
            found.append(float(load_P.max() / load_P.mean()))
    assert max(before) > 1.3 and max(after) <= worst, after


def test_one_hot_expert_is_spread_over_many_ranks() -> None:
    counts_PE = torch.ones(8, 16, dtype=torch.int64)
    counts_PE[:, 3] = 70
    experts_Pc, _ = moved(counts_PE, 1)
    assert (experts_Pc == 3).sum() == 7
    assert loads(counts_PE, 1).max() == loads(counts_PE).sum() // 8


def test_ties_are_broken_by_index() -> None:
    counts_PE = torch.full((4, 8), 10)
    counts_PE[:, :4] += 10  # ranks 0 and 1 have equal loads, and ranks 2 and 3
    experts_Pc, moved_Pc = moved(counts_PE, 1)
    assert experts_Pc.tolist() == [[-1], [-1], [0], [2]]
    assert moved_Pc.tolist() == [[0], [0], [40], [40]]


def check_kernels(num_ranks: int, num_experts: int, device: str) -> None:
    """Kernels and reference are integer arithmetic, so they agree exactly."""
    generator = torch.Generator().manual_seed(4)
    for routing, num_replicas in product(ROUTINGS, (1, 2, 3)):
        counts_PE = draw_counts(routing, num_ranks, num_experts, generator).int()
        for rank, cost in {(0, 0), (num_ranks // 2, 60), (num_ranks - 1, 0)}:
            expected = plan_clones_reference(counts_PE, num_replicas, rank, cost)
            plan = plan_clones(counts_PE.to(device), num_replicas, rank, cost)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(plan, expected, strict=True))
            ids = torch.arange(num_experts).repeat_interleave(counts_PE[rank])
            ids_TK = ids[torch.randperm(len(ids), generator=generator)].view(-1, 2) if len(ids) else ids.view(0, 2)
            slots = sort_by_expert(ids_TK, torch.zeros(ids_TK.shape), num_experts, ids_TK.numel())
            arguments = (ids_TK, slots.slots_SK, slots.offsets_e, *expected)
            new_TK = reassign(*(argument.to(device) for argument in arguments))
            assert torch.equal(new_TK.cpu(), reassign_reference(*arguments))


@pytest.mark.interpreted
@pytest.mark.parametrize(("num_ranks", "num_experts"), [(1, 4), (2, 8), (8, 64), (5, 20)])
def test_kernels_equal_references(num_ranks: int, num_experts: int) -> None:
    check_kernels(num_ranks, num_experts, "cpu")


def check_stale_counts(device: str) -> None:
    """After a failed barrier, whatever the counts are, no clone is planned."""
    counts_PE = torch.randint(-(2**31), 2**31 - 1, (3, 6), dtype=torch.int32, device=device)
    for word, is_planned in ((0, True), (2, False)):
        header = torch.tensor([word, 0, 0, 0], dtype=torch.int32, device=device)
        counts = counts_PE if word else torch.tensor([[90, 0, 0, 0, 0, 0]] * 3, dtype=torch.int32, device=device)
        plan = launch_plan(counts, 2, 1, header=header)
        assert bool((plan.experts_Pc >= 0).any()) is is_planned
        assert bool((plan.ends_I > plan.begins_I).any()) is is_planned


@pytest.mark.interpreted
def test_stale_counts_give_no_clones() -> None:
    check_stale_counts("cpu")


@pytest.mark.gpu
def test_stale_counts_give_no_clones_on_gpu() -> None:
    check_stale_counts("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("num_ranks", "num_experts"), [(1, 4), (2, 128), (8, 256), (5, 20)])
def test_kernels_equal_references_on_gpu(num_ranks: int, num_experts: int) -> None:
    check_kernels(num_ranks, num_experts, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("is_reference", [True, False])
def test_captured_plan_equals_plan_on_cpu(is_reference: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    drawn = [
        (draw_skewed_counts(generator).int(), torch.randint(-1, 128, (4096, 8), generator=generator)) for _ in range(4)
    ]
    make = plan_clones_reference if is_reference else plan_clones

    def planned(counts_PE: Tensor, ids_TK: Tensor) -> list[Tensor]:
        plan = make(counts_PE, 2, 3) if counts_PE.is_cuda else plan_clones_reference(counts_PE, 2, 3)
        return [*plan, reassigned(ids_TK, 128, plan)]

    counts_PE, ids_TK = (tensor.cuda() for tensor in drawn[0])
    planned(counts_PE, ids_TK)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = planned(counts_PE, ids_TK)
    for counts, ids in drawn:
        counts_PE.copy_(counts)
        ids_TK.copy_(ids)
        graph.replay()
        for output, expected in zip(outputs, planned(counts, ids), strict=True):
            assert torch.equal(output.cpu(), expected)
