"""Kernels that exchange clones over symmetric memory. One process runs all ranks, phase by phase."""

import operator

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.symm_mem import clones as symm_clones
from titan_moe.kernels.symm_mem.arrays import SymmArray
from titan_moe.kernels.symm_mem.clones import (
    add_clones_reference,
    add_gradients,
    clone_arrays,
    clone_bytes,
    count_arrays,
    pull_weights,
    send_counts,
    stage_gradients,
    stage_weights,
)

DEVICES = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.interpreted),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
SHAPES = ((2, 8, 24), (24, 8))
NUM_ELEMENTS = 3 * 8 * 24
PLANS = {
    "one each": [[5], [0], [4], [2]],
    "none": [[-1], [-1], [-1], [-1]],
    "some": [[-1], [11], [-1], [0]],
    "one for all": [[7, -1], [7, -1], [-1, -1], [7, 7]],
    "two each": [[3, 9], [0, 11], [2, 4], [0, 3]],
}


def share_memory(num_ranks: int, num_local: int, num_replicas: int, device: str, dtype: torch.dtype) -> list[SymmArray]:
    """Every rank's staging places, filled with NaN."""
    size = clone_bytes(num_ranks, num_local, num_replicas, NUM_ELEMENTS, dtype)
    memories = [torch.full((size,), 255, dtype=torch.uint8, device=device) for _ in range(num_ranks)]
    peer_ptrs_P = torch.tensor([memory.data_ptr() for memory in memories], device=device)
    return [clone_arrays(memory, peer_ptrs_P, num_local, num_replicas, NUM_ELEMENTS, dtype)[1] for memory in memories]


def draw(num: int, num_ranks: int, device: str, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    return [tuple(torch.randn(num, *shape, device=device).to(dtype) for shape in SHAPES) for _ in range(num_ranks)]


# staging places are numbered by local expert, or by replica slot
@pytest.mark.parametrize(("num_local", "block"), [(3, 256), (5, 4096)])
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("name", PLANS)
def test_clone_weights_are_read_and_their_gradients_added(
    name: str, num_local: int, device: str, dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symm_clones, "BLOCK", block)
    torch.manual_seed(0)
    experts_Pc = torch.tensor(PLANS[name], device=device)
    num_ranks, num_replicas = experts_Pc.shape
    shared = share_memory(num_ranks, num_local, num_replicas, device, dtype)

    weights = draw(num_local, num_ranks, device, dtype)
    for rank, (own, staged) in enumerate(zip(weights, shared, strict=True)):
        stage_weights(own, experts_Pc, staged, rank)
    for rank, (own, staged) in enumerate(zip(weights, shared, strict=True)):
        place = tuple(torch.zeros(num_replicas, *shape, device=device, dtype=dtype) for shape in SHAPES)
        assert all(map(operator.is_, pull_weights(own, experts_Pc, staged, rank, place), place))
        for index, clones in enumerate(pull_weights(own, experts_Pc, staged, rank)):
            assert torch.equal(clones[experts_Pc[rank] >= 0], place[index][experts_Pc[rank] >= 0])
            for replica, expert in enumerate(experts_Pc[rank].tolist()):
                if expert >= 0:
                    owner = weights[expert // num_local][index]
                    assert torch.equal(clones[replica], owner[expert % num_local])

    own_grads, clone_grads = draw(num_local, num_ranks, device, dtype), draw(num_replicas, num_ranks, device, dtype)
    expected = [
        add_clones_reference(
            torch.stack([own[index].flatten(1) for own in own_grads]),
            torch.stack([clones[index].flatten(1) for clones in clone_grads]),
            experts_Pc,
        )
        for index in range(len(SHAPES))
    ]
    for rank, (clones, staged) in enumerate(zip(clone_grads, shared, strict=True)):
        stage_gradients(clones, experts_Pc, staged, rank)
    for rank, (own, staged) in enumerate(zip(own_grads, shared, strict=True)):
        add_gradients(own, experts_Pc, staged, rank)
        for index, grad in enumerate(own):
            assert torch.equal(grad.flatten(1), expected[index][rank]), "equal sums in equal order"


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_counts_of_all_ranks_are_exchanged(device: str, dtype: torch.dtype) -> None:
    num_ranks, num_experts = 3, 12
    counts_PE = torch.randint(0, 9, (num_ranks, num_experts), device=device, dtype=torch.int32)
    memories = [torch.full((4096,), 255, dtype=torch.uint8, device=device) for _ in range(num_ranks)]
    peer_ptrs_P = torch.tensor([memory.data_ptr() for memory in memories], device=device)
    shared = [count_arrays(memory, peer_ptrs_P, num_experts)[1] for memory in memories]
    for rank, counts in enumerate(shared):
        send_counts(counts_PE[rank].cumsum(0).int(), counts, rank)
    assert all(torch.equal(counts.local, counts_PE) for counts in shared)


def test_count_arrays_refuse_too_little_memory() -> None:
    memory, peer_ptrs_P = torch.zeros(300, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="the loads of 12 experts on 2 ranks need 352 bytes"):
        count_arrays(memory, peer_ptrs_P, 12)


def test_clone_arrays_refuse_too_little_memory() -> None:
    memory, peer_ptrs_P = torch.zeros(1000, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(
        ValueError, match="2 clones of 576 elements in torch.float32 on each of 2 ranks need 7168 bytes"
    ):
        clone_arrays(memory, peer_ptrs_P, 3, 2, NUM_ELEMENTS, torch.float32)
