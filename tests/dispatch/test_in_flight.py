"""Two microbatches in flight, as between the stages of a pipeline: forward of both, then backward of both, gives the
bits of one after the other, for every dispatcher. So all state of an exchange is its own.

Ranks and kernels over symmetric memory are those of symm_mem/test_dispatcher.py, and what is not in an exchange is NaN.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import load
from support.reference_rows import ROWWISE_ROWS
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
from titan_moe.dispatch.async_collectives import ASYNC
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.clones.optional import ReplicaSlots
from titan_moe.dispatch.clones.weights import CollectiveCloneWeights
from titan_moe.dispatch.hierarchical import open_node_groups
from titan_moe.dispatch.symm_mem.fused import SymmMemFusedDispatcher
from titan_moe.kernels.experts.arena import Arena
from titan_moe.kernels.experts.fp8.format import FP8_ROWWISE
from titan_moe.kernels.experts.fused_mlp import FusedMLP
from titan_moe.kernels.experts.plain import PLAIN
from titan_moe.layers.experts import GroupedExperts
from titan_moe.parallel.unsharded_experts import caching_casts, use_unsharded_experts
from titan_moe.plan.cost.loads import LayerLoads

equal_local, symm_mem, fused, two_nodes = (
    load(f"dispatch/{name}")
    for name in ("test_equal_local", "symm_mem/test_dispatcher", "symm_mem/test_fused", "test_hierarchical_symm_mem")
)
ROUTINGS = ("skewed", "random", "all_to_one_rank")
"""Of the microbatches; rows, slots and clones differ. The last one fills a slab of the arena."""
ONE_AFTER_THE_OTHER = ("F0", "B0", "F1", "B1", "F2", "B2")
IN_FLIGHT = ("F0", "F1", "B0", "F2", "B1", "B2")
NUM_EXPERTS, T, K = equal_local.NUM_EXPERTS, equal_local.NUM_TOKENS, equal_local.TOP_K


def run_in_order(
    order: tuple[str, ...],
    dispatcher: TokenDispatcher,
    module: GroupedExperts,
    drawn: list[list[Tensor]],
    between: Callable[[], None] = lambda: None,
    writing_to: Callable[[int], Any] = lambda slab: nullcontext(),
) -> list[Tensor]:
    """Outputs and gradients of microbatches; F is a forward of one, B its backward. Slabs of the arena alternate."""
    module.zero_grad()
    results, leaves = {}, {}
    for action, index in order:
        x_TD, ids_TK, scores_TK, grad_TD = drawn[int(index)]
        if action == "F":
            leaves[index] = x_TD.clone().requires_grad_(), scores_TK.clone().requires_grad_()
            with writing_to(int(index) % 2):
                dispatcher.capacity.start_forward()
                inputs = dispatcher.dispatch(leaves[index][0], ids_TK, leaves[index][1])
                results[index] = dispatcher.combine(module(inputs), inputs)
        else:
            results[index].backward(grad_TD)
        between()
    grads = [leaf.grad for index in sorted(leaves) for leaf in leaves[index]]
    outputs = [results[index].detach() for index in sorted(results)]
    return [tensor.cpu() for tensor in (*outputs, *grads, *(parameter.grad for parameter in module.parameters()))]


def same_in_flight(*args: Any) -> list[bool]:
    """Whether each result has the bits of one microbatch after the other."""
    expected, actual = (run_in_order(order, *args) for order in (ONE_AFTER_THE_OTHER, IN_FLIGHT))
    assert all(tensor.isfinite().all() and tensor.abs().sum() > 0 for tensor in expected)
    return [torch.equal(a, b) for a, b in zip(expected, actual, strict=True)]


# Collectives


def local_dispatcher() -> TokenDispatcher:
    return LocalDispatcher(NUM_EXPERTS // dist.get_world_size())


def hierarchical(num_experts: int = NUM_EXPERTS, **options: Any) -> TokenDispatcher:
    return HierarchicalDispatcher(num_experts, open_node_groups(dist.group.WORLD, 1), **options)


def with_clones(kind: Callable[..., TokenDispatcher], num_replicas: int = 1) -> TokenDispatcher:
    inner = kind(NUM_EXPERTS + num_replicas * dist.get_world_size(), dist.group.WORLD)
    return CloningDispatcher(inner, NUM_EXPERTS, num_replicas, dist.group.WORLD)


def with_parts_of_experts() -> TokenDispatcher:
    return ExpertTensorDispatcher(LocalDispatcher(NUM_EXPERTS // dist.get_world_size()), dist.group.WORLD)


COLLECTIVE: dict[str, Callable[[], TokenDispatcher]] = {
    "local": local_dispatcher,
    "allgather": lambda: AllGatherDispatcher(NUM_EXPERTS, dist.group.WORLD),
    "allgather, asynchronous": lambda: AllGatherDispatcher(NUM_EXPERTS, dist.group.WORLD, collectives=ASYNC),
    "alltoall": lambda: AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD),
    "alltoall, asynchronous": lambda: AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD, collectives=ASYNC),
    "alltoall in fp8": lambda: AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD, row_format=ROWWISE_ROWS.name),
    "hierarchical": hierarchical,
    "hierarchical, asynchronous": partial(hierarchical, collectives=ASYNC),
    "experts in parts": with_parts_of_experts,
    "allgather with clones": partial(with_clones, AllGatherDispatcher),
    "alltoall with clones": partial(with_clones, AllToAllDispatcher, 2),
}


def run_collectives(kind: str) -> list[bool]:
    dispatcher, module = COLLECTIVE[kind](), symm_mem.my_experts(torch.device("cpu"))
    drawn = [symm_mem.my_inputs(routing, torch.device("cpu")) for routing in ROUTINGS]
    if "clones" in kind:
        module.transforms["clones"] = CollectiveCloneWeights(dist.group.WORLD)
    if kind in ("local", "experts in parts"):  # which have no other experts
        drawn = [[x, torch.where(ids >= 0, ids % len(module.down), -1), *rest] for x, ids, *rest in drawn]
    return same_in_flight(dispatcher, module, drawn)


@pytest.mark.parametrize("kind", COLLECTIVE)
def test_microbatches_in_flight_over_collectives(ranks: Any, kind: str) -> None:
    for same in ranks(2, run_collectives, kind):
        assert all(same), same


# Kept copies of weights


def run_kept_copies(room: int) -> list[bool]:
    """With copies in bf16 that all microbatches share, and clones."""
    dispatcher, module = with_clones(AllToAllDispatcher), symm_mem.my_experts(torch.device("cpu"))
    module.transforms["clones"] = CollectiveCloneWeights(dist.group.WORLD)
    slots = ReplicaSlots(room, are_used=True)
    use_unsharded_experts(module, init_device_mesh("cpu", (2,)), torch.float32, keeps=True, room=slots)
    drawn = [
        [x.float(), ids, scores.float(), grad.float()]
        for x, ids, scores, grad in (symm_mem.my_inputs(routing, torch.device("cpu")) for routing in ROUTINGS)
    ]
    with caching_casts(module):
        return same_in_flight(dispatcher, module, drawn)


def test_microbatches_in_flight_share_copies_and_have_their_own_clones(ranks: Any) -> None:
    for same in ranks(2, run_kept_copies, 0):
        assert all(same), same


def fail_with_room() -> str:
    try:
        run_kept_copies(1)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_clones_in_the_room_of_a_shared_copy_are_refused_by_autograd(ranks: Any) -> None:
    """So a pipeline has none (config/clones.py)."""
    assert all("modified inplace" in said for said in ranks(2, fail_with_room))


# Symmetric memory


def capacity_with_slabs(num_slabs: int, num_ranks: int, device: torch.device, *, is_fp8: bool) -> ExpertCapacity:
    """A slab has room for one layer in the worst case. What is not written is NaN."""
    capacity, num_local = ExpertCapacity(1.0, device), NUM_EXPERTS // num_ranks
    arena = Arena(
        equal_local.WIDTH,
        equal_local.HIDDEN,
        fused.dtype_of(device),
        device,
        format=FP8_ROWWISE if is_fp8 else PLAIN,
        num_slabs=num_slabs,
    )
    worst = num_ranks * T
    capacity.use_arena(arena, LayerLoads(1, 0.75 * worst, T * K, worst, worst * min(K, num_local)))
    arena.rows_AW.fill_(float("nan"))
    arena.hidden_BH.view(torch.uint8).fill_(0xFF)
    return capacity


def run_over_memory(folder: str | None, kind: str) -> list[bool]:
    memory, device = symm_mem.share(folder)
    num_replicas = symm_mem.MOST_SPARE if "clones" in kind else 0
    if kind.startswith("symm_mem"):
        module = symm_mem.my_experts(device)
        dispatcher = symm_mem.build_dispatcher(memory, module, num_replicas)
        drawn = [symm_mem.my_inputs(routing, device) for routing in ROUTINGS]
    else:
        module = fused.my_experts(device, *[FusedMLP(FP8_ROWWISE)] if "fp8" in kind else [])
        way = partial(SymmMemFusedDispatcher, overlaps="tile" in kind)
        dispatcher = fused.dispatcher_of(way, memory, module, num_replicas)
        drawn = [fused.my_inputs(routing, device) for routing in ROUTINGS]
    return same_in_flight(dispatcher, module, drawn, partial(symm_mem.poison, memory))


def run_two_levels(folder: str | None) -> list[bool]:
    groups, memory, device = two_nodes.share(folder)
    module, drawn = symm_mem.my_experts(device), [symm_mem.my_inputs(routing, device) for routing in ROUTINGS]
    dispatcher = HierarchicalDispatcher(NUM_EXPERTS, groups, memory=memory)
    return same_in_flight(dispatcher, module, drawn, partial(symm_mem.poison, memory))


def run_arena(folder: str | None, overlaps: bool, is_fp8: bool) -> tuple[list[bool], list[bool]]:
    """Whether results in slabs of an arena, and where the bound is lifted, have the bits of what autograd keeps; and
    whether a step is void, with a slab for each microbatch in flight, with the bound lifted, and with one slab for
    both."""
    memory, device = symm_mem.share(folder)
    module = fused.my_experts(device, *[FusedMLP(FP8_ROWWISE)] if is_fp8 else [])
    dispatcher = fused.dispatcher_of(partial(SymmMemFusedDispatcher, overlaps=overlaps), memory, module)
    drawn = [fused.my_inputs(routing, device) for routing in ROUTINGS]
    expected = run_in_order(ONE_AFTER_THE_OTHER, dispatcher, module, drawn)
    same, are_void = [], []
    for num_slabs, is_lifted in ((2, False), (2, True), (1, False)):
        capacity = capacity_with_slabs(num_slabs, dist.get_world_size(), device, is_fp8=is_fp8)
        dispatcher.capacity = capacity
        writing_to = capacity.writing_to if num_slabs > 1 else lambda _: nullcontext()
        poison = partial(symm_mem.poison, memory)
        with capacity.unbounded() if is_lifted else nullcontext():
            actual = run_in_order(IN_FLIGHT, dispatcher, module, drawn, poison, writing_to)
        are_void.append(bool(capacity.invalidates_step))
        if num_slabs > 1:
            same += [torch.equal(a, b) for a, b in zip(expected, actual, strict=True)]
    return same, are_void


OVER_MEMORY = ("symm_mem", "symm_mem with clones", "tile", "tile with clones", "fused", "tile in fp8")


@pytest.mark.few("symm_mem with clones", "tile with clones")
@pytest.mark.interpreted
@pytest.mark.parametrize("kind", OVER_MEMORY[:4])  # the others are those of an arena
def test_files_of_microbatches_in_flight(ranks: Any, tmp_path: Path, kind: str) -> None:
    for same in ranks(2, run_over_memory, str(tmp_path), kind):
        assert all(same), same


@pytest.mark.interpreted
def test_files_of_microbatches_in_flight_over_two_levels(ranks: Any, tmp_path: Path) -> None:
    for same in ranks(2, run_two_levels, str(tmp_path)):
        assert all(same), same


@pytest.mark.few("True-False", "False-False")
@pytest.mark.interpreted
@pytest.mark.parametrize(("overlaps", "is_fp8"), [(True, False), (False, False), (True, True)])
def test_files_of_microbatches_in_flight_have_slabs_in_an_arena(
    ranks: Any, tmp_path: Path, overlaps: bool, is_fp8: bool
) -> None:
    for same, are_void in ranks(2, run_arena, str(tmp_path), overlaps, is_fp8):
        assert all(same), same
        assert are_void == [False, False, True], "a slab that was used again is found"


@fused.with_gpus
@pytest.mark.parametrize("kind", OVER_MEMORY)
def test_gpus_of_microbatches_in_flight(ranks_of_a_size: Any, num_ranks: int, kind: str) -> None:
    for same in ranks_of_a_size(num_ranks, run_over_memory, None, kind):
        assert all(same), same


@fused.with_gpus
@pytest.mark.parametrize(("overlaps", "is_fp8"), [(True, False), (False, False), (True, True)])
def test_gpus_of_microbatches_in_flight_have_slabs_in_an_arena(
    ranks_of_a_size: Any, num_ranks: int, overlaps: bool, is_fp8: bool
) -> None:
    for same, are_void in ranks_of_a_size(num_ranks, run_arena, None, overlaps, is_fp8):
        assert all(same) and are_void == [False, False, True]
