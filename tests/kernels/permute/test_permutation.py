"""Both permutes against a plain loop, with exactly enough slots, too many and too few."""

from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.choose import PERMUTE
from titan_moe.kernels.permute.counting_sort import scores_of_slots, sort_assignments
from titan_moe.kernels.permute.permutation import Permutation, Permute, sort_by_expert

pytestmark = pytest.mark.slow

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
PERMUTES: dict[str, Permute] = {
    "torch": sort_by_expert,
    "triton": PERMUTE["triton"],
    "triton_in_small_blocks": partial(sort_assignments, block=32, chunk=4),
}
CASES = {  # rows, experts a row, experts, share of assignments that are -1
    "random": (40, 3, 5, 0.0),
    "some_absent": (40, 3, 5, 0.4),
    "top_1": (50, 1, 7, 0.1),
    "one_expert": (20, 1, 1, 0.5),
    "many_experts": (12, 8, 40, 0.1),
    "512_experts": (30, 8, 512, 0.1),
    "all_absent": (10, 2, 4, 1.0),
    "no_rows": (0, 2, 4, 0.0),
    "two_chunks": (80, 2, 16, 0.2),
}


def on_devices(*names: str, cases: Iterable[str] = ("",)) -> list[Any]:
    """Each permute on each device that runs it. The interpreter takes a second for a block of full size, and too long
    for hundreds of experts, so those cases need a GPU."""
    found = []
    for name, case in product(names, cases):
        args = (case, name) if case else (name,)
        test_id = "-".join(args)
        is_slow = case and name == "triton" or case == "512_experts"
        if name == "torch":
            found.append(pytest.param(*args, "cpu", id=f"{test_id}-cpu"))
        elif not is_slow:
            found.append(pytest.param(*args, "cpu", id=f"{test_id}-cpu", marks=pytest.mark.interpreted))
        found.append(pytest.param(*args, "cuda", id=f"{test_id}-cuda", marks=pytest.mark.gpu))
    return found


def draw_routing(case: str, device: str) -> tuple[Tensor, Tensor, int]:
    num_rows, top_k, num_experts, absent = CASES[case]
    generator = torch.Generator().manual_seed(0)
    ids_SK = torch.rand(num_rows, num_experts, generator=generator).topk(top_k).indices
    ids_SK = torch.where(torch.rand(ids_SK.shape, generator=generator) < absent, -1, ids_SK)
    return ids_SK.to(device), torch.rand(ids_SK.shape, generator=generator).to(device), num_experts


def check(slots: Permutation, ids_SK: Tensor, scores_SK: Tensor, num_experts: int, num_slots: int) -> None:
    """Assign slots in a loop, expert by expert and in the order of assignments; what does not fit gets none."""
    num_rows, top_k = ids_SK.shape
    ids, scores = ids_SK.flatten().tolist(), scores_SK.flatten().tolist()
    in_order = [i for expert in range(num_experts) for i, assigned in enumerate(ids) if assigned == expert]
    kept = in_order[:num_slots]
    slot_of = {i: slot for slot, i in enumerate(kept)}
    assert slots.slots_SK.flatten().tolist() == [slot_of.get(i, -1) for i in range(len(ids))]
    assert slots.rows_R.tolist()[: len(kept)] == [i // top_k for i in kept]
    assert all(0 <= row < max(num_rows, 1) for row in slots.rows_R.tolist())
    assert slots.scores_R.tolist() == [scores[i] for i in kept] + [0.0] * (num_slots - len(kept))
    counts = [sum(ids[i] == expert for i in kept) for expert in range(num_experts)]
    assert slots.offsets_e.tolist() == torch.tensor(counts).cumsum(0).tolist()
    assert slots.overflowed.tolist() == int(len(in_order) > num_slots)
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


@pytest.mark.parametrize(("case", "name", "device"), on_devices(*PERMUTES, cases=CASES))
def test_permutation_equals_loop(case: str, name: str, device: str) -> None:
    ids_SK, scores_SK, num_experts = draw_routing(case, device)
    for num_slots in bounds(ids_SK).values():
        check(PERMUTES[name](ids_SK, scores_SK, num_experts, num_slots), ids_SK, scores_SK, num_experts, num_slots)


@pytest.mark.parametrize(("name", "device"), on_devices(*PERMUTES))
def test_permutation_of_int32_ids_and_fp64_scores(name: str, device: str) -> None:
    ids_SK, scores_SK, num_experts = draw_routing("some_absent", device)
    ids_SK, scores_SK = ids_SK.int(), scores_SK.double()
    check(PERMUTES[name](ids_SK, scores_SK, num_experts, 100), ids_SK, scores_SK, num_experts, 100)


@pytest.mark.parametrize(("name", "device"), on_devices("torch", "triton"))
def test_permuted_score_gradient_is_zero_without_a_slot(name: str, device: str) -> None:
    ids_SK, scores_SK, num_experts = draw_routing("some_absent", device)
    scores_SK.requires_grad_()
    slots = PERMUTES[name](ids_SK, scores_SK, num_experts, 30)
    assert [x.requires_grad for x in slots] == [False, False, True, False, False]
    grad_R = torch.arange(1.0, 31.0, device=device)
    slots.scores_R.backward(grad_R)
    assert scores_SK.grad.tolist() == [[float(slot + 1) for slot in row] for row in slots.slots_SK.tolist()]
    assert int((scores_SK.grad == 0).sum()) == ids_SK.numel() - 30 > int((ids_SK < 0).sum())


@pytest.mark.parametrize(("name", "device"), on_devices("torch", "triton"))
def test_permuted_score_gradient_may_be_expanded(name: str, device: str) -> None:
    ids_SK, scores_SK, num_experts = draw_routing("some_absent", device)
    scores_SK.requires_grad_()
    PERMUTES[name](ids_SK, scores_SK, num_experts, ids_SK.numel()).scores_R.sum().backward()
    torch.testing.assert_close(scores_SK.grad, (ids_SK >= 0).float())


@pytest.mark.parametrize(("name", "device"), on_devices("torch", "triton"))
def test_permutation_compiles_as_one_graph(name: str, device: str) -> None:
    torch._dynamo.reset()
    permute = torch.compile(PERMUTES[name], fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    ids_SK, scores_SK, num_experts = draw_routing("some_absent", device)
    for num_slots in (ids_SK.numel(), ids_SK.numel() // 2):
        check(permute(ids_SK, scores_SK, num_experts, num_slots), ids_SK, scores_SK, num_experts, num_slots)


@pytest.mark.parametrize("device", DEVICES)
def test_scores_of_slots_without_assignments_are_empty(device: str) -> None:
    none_SK = torch.empty(0, 3, dtype=torch.int32, device=device)
    assert scores_of_slots(torch.zeros(4, device=device), none_SK).shape == (0, 3)


@pytest.mark.gpu
def test_triton_permutation_of_16_million_assignments_equals_torch() -> None:
    ids_SK = torch.rand(2_097_152, 64, device="cuda").topk(8).indices
    scores_SK = torch.rand(ids_SK.shape, device="cuda")
    for num_slots in (ids_SK.numel(), ids_SK.numel() - 1000):
        expected = sort_by_expert(ids_SK, scores_SK, 64, num_slots)
        actual = PERMUTE["triton"](ids_SK, scores_SK, 64, num_slots)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.gpu
def test_captured_permutation_follows_new_routing() -> None:
    ids_SK, scores_SK, num_experts = draw_routing("two_chunks", "cuda")
    permute, num_slots = PERMUTE["triton"], ids_SK.numel() // 2
    permute(ids_SK, scores_SK, num_experts, num_slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots = permute(ids_SK, scores_SK, num_experts, num_slots)
    for absent in (0.9, 0.1):
        ids_SK.copy_(torch.where(torch.rand(ids_SK.shape, device="cuda") < absent, -1, ids_SK.flip(0)))
        graph.replay()
        check(slots, ids_SK, scores_SK, num_experts, num_slots)
