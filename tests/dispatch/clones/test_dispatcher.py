"""Cloning dispatcher: bounded slots, memory for backward, rounding of gradients. test_equal_local.py checks values."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from titan_moe.dispatch import AllGatherDispatcher, AllToAllDispatcher, CloningDispatcher
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.clones.dispatcher import CloningExchange
from titan_moe.dispatch.clones.weights import CollectiveCloneWeights
from titan_moe.kernels.choose import choose_expert_mlp
from titan_moe.kernels.experts.weights import ExpertUse, ExpertWeights
from titan_moe.layers.experts import GroupedExperts

pytestmark = pytest.mark.slow

NUM_EXPERTS, NUM_REPLICAS, NUM_TOKENS, WIDTH, HIDDEN = 8, 1, 400, 16, 8


def cloning(kind: str, capacity: ExpertCapacity) -> CloningDispatcher:
    group = dist.group.WORLD
    num_inner_experts = NUM_EXPERTS + NUM_REPLICAS * group.size()
    if kind == "allgather":
        inner = AllGatherDispatcher(num_inner_experts, group, capacity=capacity)
    else:
        inner = AllToAllDispatcher(num_inner_experts, group)
    return CloningDispatcher(inner, NUM_EXPERTS, NUM_REPLICAS, group)


def skewed_inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """On all ranks two thirds of the rows are routed to two experts of rank 0."""
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(NUM_TOKENS, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    ids_TK = torch.randint(NUM_EXPERTS, (NUM_TOKENS, 1), generator=generator)
    ids_TK[::3], ids_TK[1::3] = 0, 1
    return x_TD, ids_TK, torch.rand(NUM_TOKENS, 1, generator=generator, dtype=torch.float64, requires_grad=True)


def experts() -> GroupedExperts:
    own = NUM_EXPERTS // dist.get_world_size()
    module = GroupedExperts(own, WIDTH, HIDDEN, choose_expert_mlp("reference", "activation")).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    module.transforms["clones"] = CollectiveCloneWeights(dist.group.WORLD)
    return module


def run_bounded(capacity_factor: float) -> tuple[list[bool], list[int]]:
    """Whether slots overflow without clones and with them, and the offsets of experts with them."""
    capacity = ExpertCapacity(capacity_factor)
    plain = AllGatherDispatcher(NUM_EXPERTS, dist.group.WORLD, capacity=capacity)
    inputs, overflowed = skewed_inputs(dist.get_rank()), []
    for dispatcher in (plain, cloning("allgather", capacity)):
        capacity.reset()
        routed = dispatcher.dispatch(*inputs)
        overflowed.append(bool(capacity.overflowed))
    return overflowed, routed.offsets_e.tolist()


def test_clones_prevent_overflow_of_bounded_slots(ranks) -> None:
    (first, offsets_of_first), (second, offsets_of_second) = ranks(2, run_bounded, 1.3)
    assert first == [True, False] and second == [False, False]
    assert offsets_of_first[-1] == offsets_of_second[-1] == NUM_TOKENS
    assert offsets_of_second[-1] > offsets_of_second[-2], "assignments that moved away from rank 0"


def saved_weights(kind: str, is_compiled: bool) -> tuple[int, int]:
    """Bytes of weights that are saved for backward beside the parameters, and bytes of the clones."""
    module, dispatcher = experts(), cloning(kind, ExpertCapacity())
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.dim() > 2 and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch._dynamo.reset()
    serve = torch.compile(module, fullgraph=True, backend="aot_eager") if is_compiled else module
    routed = dispatcher.dispatch(*skewed_inputs(dist.get_rank()))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y_SD = serve(routed)
    y_SD.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in module.parameters())
    expert = sum(parameter[0].numel() * parameter.element_size() for parameter in module.parameters())
    return sum(kept.values()), NUM_REPLICAS * expert


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_clones_are_the_only_weights_saved_for_backward(ranks, kind: str, is_compiled: bool) -> None:
    for kept, clones in ranks(2, saved_weights, kind, is_compiled):
        assert 0 < kept <= 2 * clones, "c experts, as parts of one row or as tensors of their own"


SHAPES = {"gate_up": (2, 4, 64), "down": (64, 4), "gate_up_bias": (2, 4), "down_bias": (64,)}
"""Parameters of an expert."""


def sum_gradients_in_bf16() -> tuple[Tensor, ...]:
    """Gradients of an expert that all ranks but its owner have cloned, random and in bf16."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    experts_Pc = torch.full((num_ranks, 1), 0)
    experts_Pc[0] = -1
    weights = [torch.zeros(1, *shape, dtype=torch.bfloat16, requires_grad=True) for shape in SHAPES.values()]
    own, exchange = ExpertWeights.of(weights, tuple(SHAPES)), CloningExchange(None, experts_Pc, 1)
    use = CollectiveCloneWeights(dist.group.WORLD)(ExpertUse(own, torch.zeros(2, 64), exchange))
    grads = gradients_of(rank)
    grads = [*grads, *(grad * 0 if rank == 0 else grad for grad in grads)]
    torch.autograd.backward(use.weights.tensors(), grads)
    return tuple(weight.grad for weight in weights)


def gradients_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(1, *shape, generator=generator).bfloat16() for shape in SHAPES.values()]


def test_clone_gradients_are_summed_in_fp32_and_rounded_once(ranks) -> None:
    owner, *others = ranks(4, sum_gradients_in_bf16)
    for index in range(len(SHAPES)):
        exact = torch.stack([gradients_of(rank)[index].double() for rank in range(4)]).sum(0)
        assert (owner[index] != exact.bfloat16()).float().mean() < 0.01
        for rank, grads in enumerate(others, start=1):
            assert torch.equal(grads[index], gradients_of(rank)[index]), "experts without clones"
