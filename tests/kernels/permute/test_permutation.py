"""Both ways to lay out choices against a loop that says what a slot is, with too many slots and with too few."""

from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.permute.counting_sort import scores_of_slots, sort_choices
from titan_moe.kernels.permute.permutation import Permutation, Permute, choose_permute, sort_by_expert

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
WAYS: dict[str, Permute] = {
    "torch": sort_by_expert,
    "triton": choose_permute("triton"),
    "triton_in_small_blocks": partial(sort_choices, block=32, chunk=4),
}
CASES = {  # rows, choices a row, experts, share of absent choices
    "random": (40, 3, 5, 0.0),
    "some_absent": (40, 3, 5, 0.4),
    "one_choice": (50, 1, 7, 0.1),
    "one_expert": (20, 1, 1, 0.5),
    "many_experts": (12, 8, 40, 0.1),
    "all_experts_there_may_be": (30, 8, 512, 0.1),
    "nobody": (10, 2, 4, 1.0),
    "no_rows": (0, 2, 4, 0.0),
    "two_chunks": (80, 2, 16, 0.2),
}


def places(*ways: str, cases: Iterable[str] = ("",)) -> list[Any]:
    """Each way wherever it runs, in each case if it can there: the interpreter takes a second a block of full size, and
    too long for hundreds of experts."""
    found = []
    for way, case in product(ways, cases):
        args = (case, way) if case else (way,)
        name = "-".join(args)
        is_slow = case and way == "triton" or case == "all_experts_there_may_be"
        if way == "torch":
            found.append(pytest.param(*args, "cpu", id=f"{name}-cpu"))
        elif not is_slow:
            found.append(pytest.param(*args, "cpu", id=f"{name}-cpu", marks=pytest.mark.interpreted))
        found.append(pytest.param(*args, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu))
    return found


def drawn(case: str, device: str) -> tuple[Tensor, Tensor, int]:
    num_rows, num_choices, num_experts, absent = CASES[case]
    generator = torch.Generator().manual_seed(0)
    ids_SK = torch.rand(num_rows, num_experts, generator=generator).topk(num_choices).indices
    ids_SK = torch.where(torch.rand(ids_SK.shape, generator=generator) < absent, -1, ids_SK)
    return ids_SK.to(device), torch.rand(ids_SK.shape, generator=generator).to(device), num_experts


def check(slots: Permutation, ids_SK: Tensor, scores_SK: Tensor, num_experts: int, num_slots: int) -> None:
    """Deal out slots expert by expert, choice by choice; what does not fit gets none."""
    num_rows, num_choices = ids_SK.shape
    ids, scores = ids_SK.flatten().tolist(), scores_SK.flatten().tolist()
    wanted = [choice for expert in range(num_experts) for choice, own in enumerate(ids) if own == expert]
    served = wanted[:num_slots]
    slot_of = {choice: slot for slot, choice in enumerate(served)}
    assert slots.slots_SK.flatten().tolist() == [slot_of.get(choice, -1) for choice in range(len(ids))]
    assert slots.rows_R.tolist()[: len(served)] == [choice // num_choices for choice in served]
    assert all(0 <= row < max(num_rows, 1) for row in slots.rows_R.tolist())
    assert slots.scores_R.tolist() == [scores[choice] for choice in served] + [0.0] * (num_slots - len(served))
    counts = [sum(ids[choice] == expert for choice in served) for expert in range(num_experts)]
    assert slots.offsets_e.tolist() == torch.tensor(counts).cumsum(0).tolist()
    assert slots.overflowed.tolist() == int(len(wanted) > num_slots)
    assert slots.overflowed.shape == () and slots.rows_R.shape == slots.scores_R.shape == (num_slots,)
    integers = (slots.rows_R, slots.slots_SK, slots.offsets_e, slots.overflowed)
    assert {x.dtype for x in integers} == {torch.int32} and slots.scores_R.dtype == scores_SK.dtype


def bounds(ids_SK: Tensor) -> dict[str, int]:
    exact, most = int((ids_SK >= 0).sum()), ids_SK.numel()
    return {
        "exact": exact,
        "worst case": most,
        "more than all": most + 70,
        "one too few": max(exact - 1, 0),
        "half": exact // 2,
        "no slot": 0,
    }


@pytest.mark.parametrize(("case", "way", "device"), places(*WAYS, cases=CASES))
def test_slots_are_dealt_out(case: str, way: str, device: str) -> None:
    ids_SK, scores_SK, num_experts = drawn(case, device)
    for num_slots in bounds(ids_SK).values():
        check(WAYS[way](ids_SK, scores_SK, num_experts, num_slots), ids_SK, scores_SK, num_experts, num_slots)


@pytest.mark.parametrize(("way", "device"), places(*WAYS))
def test_ids_and_scores_of_other_types(way: str, device: str) -> None:
    ids_SK, scores_SK, num_experts = drawn("some_absent", device)
    ids_SK, scores_SK = ids_SK.int(), scores_SK.double()
    check(WAYS[way](ids_SK, scores_SK, num_experts, 100), ids_SK, scores_SK, num_experts, 100)


@pytest.mark.parametrize(("way", "device"), places("torch", "triton"))
def test_a_score_without_a_slot_has_no_gradient(way: str, device: str) -> None:
    ids_SK, scores_SK, num_experts = drawn("some_absent", device)
    scores_SK.requires_grad_()
    slots = WAYS[way](ids_SK, scores_SK, num_experts, 30)
    assert [x.requires_grad for x in slots] == [False, False, True, False, False]
    grad_R = torch.arange(1.0, 31.0, device=device)
    slots.scores_R.backward(grad_R)
    assert scores_SK.grad.tolist() == [[float(slot + 1) for slot in row] for row in slots.slots_SK.tolist()]
    assert int((scores_SK.grad == 0).sum()) == ids_SK.numel() - 30 > int((ids_SK < 0).sum())


@pytest.mark.parametrize(("way", "device"), places("torch", "triton"))
def test_an_expanded_gradient_is_taken(way: str, device: str) -> None:
    ids_SK, scores_SK, num_experts = drawn("some_absent", device)
    scores_SK.requires_grad_()
    WAYS[way](ids_SK, scores_SK, num_experts, ids_SK.numel()).scores_R.sum().backward()
    torch.testing.assert_close(scores_SK.grad, (ids_SK >= 0).float())


@pytest.mark.parametrize(("way", "device"), places("torch", "triton"))
def test_slots_compile_as_one_graph(way: str, device: str) -> None:
    torch._dynamo.reset()
    permute = torch.compile(WAYS[way], fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    ids_SK, scores_SK, num_experts = drawn("some_absent", device)
    for num_slots in (ids_SK.numel(), ids_SK.numel() // 2):
        check(permute(ids_SK, scores_SK, num_experts, num_slots), ids_SK, scores_SK, num_experts, num_slots)


@pytest.mark.parametrize("device", DEVICES)
def test_triton_slots_are_a_sound_operation(device: str) -> None:
    ids_SK, scores_SK, num_experts = drawn("some_absent", device)
    args = (ids_SK, scores_SK.requires_grad_(), num_experts, 100)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.titan_moe.counting_sort.default, args, test_utils=tests)
    slots = sort_by_expert(ids_SK, scores_SK.detach(), num_experts, 100)
    torch.library.opcheck(
        torch.ops.titan_moe.scores_of_slots.default, (slots.scores_R, slots.slots_SK), test_utils=tests
    )


@pytest.mark.parametrize("device", DEVICES)
def test_triton_slots_without_choices_fetch_nothing(device: str) -> None:
    none_SK = torch.empty(0, 3, dtype=torch.int32, device=device)
    assert scores_of_slots(torch.zeros(4, device=device), none_SK).shape == (0, 3)


@pytest.mark.gpu
def test_sixteen_million_choices() -> None:
    ids_SK = torch.rand(2_097_152, 64, device="cuda").topk(8).indices
    scores_SK = torch.rand(ids_SK.shape, device="cuda")
    for num_slots in (ids_SK.numel(), ids_SK.numel() - 1000):
        expected = sort_by_expert(ids_SK, scores_SK, 64, num_slots)
        for actual, wanted in zip(choose_permute("triton")(ids_SK, scores_SK, 64, num_slots), expected, strict=True):
            assert torch.equal(actual, wanted)


@pytest.mark.gpu
def test_slots_follow_the_routing_of_a_replay() -> None:
    ids_SK, scores_SK, num_experts = drawn("two_chunks", "cuda")
    permute, num_slots = choose_permute("triton"), ids_SK.numel() // 2
    permute(ids_SK, scores_SK, num_experts, num_slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots = permute(ids_SK, scores_SK, num_experts, num_slots)
    for absent in (0.9, 0.1):
        ids_SK.copy_(torch.where(torch.rand(ids_SK.shape, device="cuda") < absent, -1, ids_SK.flip(0)))
        graph.replay()
        check(slots, ids_SK, scores_SK, num_experts, num_slots)
