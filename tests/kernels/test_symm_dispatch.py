"""Exchanges over memory that ranks share: all ranks in one process, each phase for all of them before the next.

That is what the barriers are for, so here they stand in the order of lines. The same runs on one GPU.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.symm_dispatch import SymmArrays, symm_arrays, symm_bytes
from titan_moe.kernels.symm_dispatch_choices import pull_scores, push_choices, take_choices
from titan_moe.kernels.symm_dispatch_plan import count_copies, place_copies, place_copies_reference
from titan_moe.kernels.symm_dispatch_rows import (
    copy_rows,
    pull_rows,
    pull_rows_reference,
    push_rows,
    push_rows_reference,
)

NUM_LOCAL, TOP_K = 2, 3
ROUTINGS = ("balanced", "skewed", "one_rank_empty", "all_to_one_rank", "dropped_choices", "nobody")
DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


class Batch(NamedTuple):
    """What all ranks bring: rows, choices, and a gradient for the result."""

    x_PTD: Tensor
    ids_PTK: Tensor
    scores_PTK: Tensor
    dy_PTD: Tensor


def draw(routing: str, num_ranks: int, num_tokens: int, width: int, device: str, dtype: torch.dtype) -> Batch:
    num_experts = num_ranks * NUM_LOCAL
    scores_PTE = torch.rand(num_ranks, num_tokens, max(num_experts, TOP_K), device=device)
    if routing == "skewed":
        scores_PTE[..., 1] += 0.8
    if routing == "one_rank_empty":
        scores_PTE[..., -NUM_LOCAL:] -= 2
    ids_PTK = scores_PTE.topk(TOP_K).indices
    if routing == "one_rank_empty":
        ids_PTK = torch.where(ids_PTK >= num_experts - NUM_LOCAL, -1, ids_PTK)
    if routing == "all_to_one_rank":  # to the last: a local expert and none that is not there
        ids_PTK = torch.where(ids_PTK.argsort(-1) < NUM_LOCAL, num_experts - 1 - ids_PTK.argsort(-1), -1)
    if routing == "dropped_choices":
        ids_PTK = torch.where(torch.rand(ids_PTK.shape, device=device) < 0.5, -1, ids_PTK)
    if routing == "nobody":
        ids_PTK = torch.full_like(ids_PTK, -1)
    ids_PTK = torch.where(ids_PTK < num_experts, ids_PTK, -1)
    x_PTD, dy_PTD = (torch.randn(num_ranks, num_tokens, width, device=device).to(dtype) for _ in range(2))
    return Batch(x_PTD, ids_PTK, torch.rand(ids_PTK.shape, device=device), dy_PTD)


def share_memory(
    num_ranks: int, num_tokens: int, width: int, device: str, dtype: torch.dtype, max_rows: int | None = None
) -> list[SymmArrays]:
    """Every rank's arrays, poisoned: bytes of 255 are NaN, and -1 where they are integers. The memory has room for all
    rows, the arrays for as many as they are told."""
    max_rows = num_ranks * num_tokens if max_rows is None else max_rows
    size = symm_bytes(num_ranks, num_tokens, width, TOP_K, dtype)
    memories = [torch.full((size,), 255, dtype=torch.uint8, device=device) for _ in range(num_ranks)]
    addresses_P = torch.tensor([memory.data_ptr() for memory in memories], device=device)
    return [symm_arrays(memory, addresses_P, max_rows, width, TOP_K, dtype) for memory in memories]


def bytes_past(arrays: SymmArrays) -> Tensor:
    """What lies behind a rank's arrays, which nobody may touch."""
    memory = torch.empty(0, dtype=torch.uint8, device=arrays.rows.local.device).set_(
        arrays.rows.local.untyped_storage()
    )
    return memory[arrays.rows.offset_bytes + arrays.rows.local.nbytes :]


def plan(batch: Batch, arrays: list[SymmArrays]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    starts = [
        count_copies(ids, mine.counts, rank, NUM_LOCAL)
        for rank, (ids, mine) in enumerate(zip(batch.ids_PTK, arrays, strict=True))
    ]
    placed = [
        place_copies(ids, start, mine.counts, rank, NUM_LOCAL, len(mine.rows.local))
        for rank, (ids, start, mine) in enumerate(zip(batch.ids_PTK, starts, arrays, strict=True))
    ]
    places, num_rows, overflowed = zip(*placed, strict=True)
    return list(places), list(num_rows), list(overflowed)


def push(x_PTD: Tensor, places: list[Tensor], num_rows: list[Tensor], arrays: list[SymmArrays]) -> list[Tensor]:
    for rank, mine in enumerate(arrays):
        push_rows(x_PTD[rank], places[rank], mine.rows, rank)
    received = [torch.full_like(mine.rows.local, float("nan")) for mine in arrays]
    for x_SD, count, mine in zip(received, num_rows, arrays, strict=True):
        copy_rows(mine.rows.local, x_SD, count)
    return received


def pull(y_PSD: list[Tensor], places: list[Tensor], num_rows: list[Tensor], arrays: list[SymmArrays]) -> list[Tensor]:
    for y_SD, count, mine in zip(y_PSD, num_rows, arrays, strict=True):
        copy_rows(y_SD, mine.rows.local, count)
    return [pull_rows(places_TP, mine.rows) for places_TP, mine in zip(places, arrays, strict=True)]


def wanted_rows(ids_PTK: Tensor, rank: int) -> list[tuple[int, int]]:
    """(source, token) of each row that a rank must get, in order, found one by one."""
    first = rank * NUM_LOCAL
    return [
        (source, token)
        for source, ids_TK in enumerate(ids_PTK.tolist())
        for token, ids in enumerate(ids_TK)
        if any(first <= expert < first + NUM_LOCAL for expert in ids)
    ]


def check_received(batch: Batch, places: list[Tensor], num_rows: list[Tensor], arrays: list[SymmArrays]) -> None:
    """Push everything, and compare rows, order, ids, scores and counts with what should have come."""
    assert sum((placed >= 0).sum() for placed in places) == sum(num_rows)
    received = push(batch.x_PTD, places, num_rows, arrays)
    for rank, mine in enumerate(arrays):
        push_choices(batch.ids_PTK[rank], batch.scores_PTK[rank], places[rank], mine, rank, NUM_LOCAL)
    for rank, mine in enumerate(arrays):
        wanted, first = wanted_rows(batch.ids_PTK, rank), rank * NUM_LOCAL
        assert num_rows[rank].item() == len(wanted)
        for row, (source, token) in enumerate(wanted):
            assert places[source][token, rank] == row
        ids_SK, scores_SK = take_choices(mine, num_rows[rank])
        assert (ids_SK[len(wanted) :] == -1).all() and not scores_SK[len(wanted) :].any()
        assert received[rank][len(wanted) :].isnan().all()
        if wanted:
            sources, tokens = torch.tensor(wanted, device=ids_SK.device).unbind(1)
            assert torch.equal(received[rank][: len(wanted)], batch.x_PTD[sources, tokens])
            assert torch.equal(scores_SK[: len(wanted)], batch.scores_PTK[sources, tokens])
            expected = batch.ids_PTK[sources, tokens] - first
            expected = torch.where((expected >= 0) & (expected < NUM_LOCAL), expected, -1)
            assert torch.equal(ids_SK[: len(wanted)], expected.int())


def experts_of(x: Tensor, ids: Tensor, scores: Tensor, weights_E: Tensor) -> Tensor:
    """Expert e multiplies by a number of its own and takes the sine: enough to tell experts and copies apart."""
    total = torch.zeros_like(x)
    for k in range(ids.shape[1]):
        weight = weights_E[ids[:, k].clamp(min=0)][:, None]
        total = total + torch.where((ids[:, k] >= 0)[:, None], scores[:, k, None] * (weight * x).sin(), 0)
    return total


def check_layer(batch: Batch, arrays: list[SymmArrays], tolerance: float) -> None:
    """A layer forward and backward, against one that moves nothing."""
    weights_E = torch.linspace(0.5, 2, len(arrays) * NUM_LOCAL, device=batch.x_PTD.device)
    places, num_rows, overflowed = plan(batch, arrays)
    assert not any(overflowed)
    check_received(batch, places, num_rows, arrays)
    served = []
    for rank, mine in enumerate(arrays):
        count = int(num_rows[rank])
        x_SD = mine.rows.local[:count].float().requires_grad_()  # valid until the next exchange
        scores_SK = mine.scores.local[:count].clone().requires_grad_()
        weights_e = weights_E[rank * NUM_LOCAL : (rank + 1) * NUM_LOCAL]
        served.append((x_SD, scores_SK, experts_of(x_SD, mine.ids.local[:count], scores_SK, weights_e)))

    def as_received(rows: list[Tensor], like: str) -> list[Tensor]:
        """Rows that are there, and NaN in the place of those that did not come."""
        outs = [torch.full_like(getattr(mine, like).local, float("nan")) for mine in arrays]
        for out, row in zip(outs, rows, strict=True):
            out[: len(row)] = row.detach()
        return outs

    y_PTD = torch.stack(pull(as_received([y for _, _, y in served], "rows"), places, num_rows, arrays))
    dy = push(batch.dy_PTD, places, num_rows, arrays)
    for (_, _, y_SD), dy_SD in zip(served, dy, strict=True):
        y_SD.backward(dy_SD[: len(y_SD)].float())
    dscores = as_received([s.grad for _, s, _ in served], "scores")
    for dscores_SK, count, mine in zip(dscores, num_rows, arrays, strict=True):
        copy_rows(dscores_SK, mine.scores.local, count)
    dx_PTD = torch.stack(pull(as_received([x.grad for x, _, _ in served], "rows"), places, num_rows, arrays))
    dscores_PTK = torch.stack(
        [pull_scores(ids, p, m.scores, NUM_LOCAL) for ids, p, m in zip(batch.ids_PTK, places, arrays, strict=True)]
    )
    x, scores = batch.x_PTD.flatten(0, 1).float().requires_grad_(), batch.scores_PTK.flatten(0, 1).requires_grad_()
    y = experts_of(x, batch.ids_PTK.flatten(0, 1), scores, weights_E)
    y.backward(batch.dy_PTD.flatten(0, 1).float())
    for actual, expected in ((y_PTD, y), (dx_PTD, x.grad), (dscores_PTK, scores.grad)):
        torch.testing.assert_close(actual.flatten(0, 1).float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_symm_layer_equals_one_that_moves_nothing(routing: str, num_ranks: int, device: str) -> None:
    """Two layers in the same memory: the second finds what the first has left."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(num_ranks)
    num_tokens, width = int(torch.randint(1, 12, ())), 8 + num_ranks
    arrays = share_memory(num_ranks, num_tokens, width, device, dtype)
    for _ in range(2):
        batch = draw(routing, num_ranks, num_tokens, width, device, dtype)
        check_layer(batch, arrays, 1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_symm_plan_of_many_blocks(num_ranks: int, device: str) -> None:
    """More tokens than one program counts, rank counts that are no power of two, and ids of 32 bits."""
    torch.manual_seed(0)
    batch = draw("balanced", num_ranks, 300, 4, device, torch.float32)
    arrays = share_memory(num_ranks, 300, 4, device, torch.float32)
    places, num_rows, _ = plan(batch._replace(ids_PTK=batch.ids_PTK.int()), arrays)
    check_received(batch, places, num_rows, arrays)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_symm_references_say_what_the_exchange_is(routing: str, num_ranks: int) -> None:
    """Plain torch, on any machine: the plan against rows found one by one, the moves against a sum."""
    torch.manual_seed(num_ranks)
    batch = draw(routing, num_ranks, 13, 8, "cpu", torch.float32)
    places_PTP, num_rows_P, overflowed_P = place_copies_reference(batch.ids_PTK, NUM_LOCAL, 13 * num_ranks)
    assert not overflowed_P.any()
    rows_PSD = [torch.full((13 * num_ranks, 8), float("nan")) for _ in range(num_ranks)]
    for x_TD, places_TP in zip(batch.x_PTD, places_PTP, strict=True):
        push_rows_reference(x_TD, places_TP, rows_PSD)
    for rank, rows_SD in enumerate(rows_PSD):
        wanted = wanted_rows(batch.ids_PTK, rank)
        assert num_rows_P[rank] == len(wanted) == (~rows_SD.isnan()).all(1).sum()
        for row, (source, token) in enumerate(wanted):
            assert torch.equal(rows_SD[row], batch.x_PTD[source, token])
    for x_TD, places_TP in zip(batch.x_PTD, places_PTP, strict=True):
        num_copies_T1 = (places_TP >= 0).sum(1, keepdim=True)
        torch.testing.assert_close(pull_rows_reference(rows_PSD, places_TP), x_TD * num_copies_T1)


@pytest.mark.parametrize("device", DEVICES)
def test_symm_kernels_do_what_their_references_do(device: str) -> None:
    """Many plans, of which every other may have too little room: places, counts, rows and sums, bit for bit."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for seed in range(100 if device == "cpu" else 1000):
        torch.manual_seed(seed)
        num_ranks, routing = (2, 2, 2, 4, 4, 8)[seed % 6], ROUTINGS[seed // 6 % len(ROUTINGS)]
        num_tokens = int(torch.randint(0, 12, ()))
        batch = draw(routing, num_ranks, num_tokens, 8, device, dtype)
        max_rows = num_tokens * num_ranks
        max_rows = max_rows if seed % 2 else int(torch.randint(0, max_rows + 1, ()))
        arrays = share_memory(num_ranks, num_tokens, 8, device, dtype, max_rows)
        planned = plan(batch, arrays)
        for actual, expected in zip(planned, place_copies_reference(batch.ids_PTK, NUM_LOCAL, max_rows), strict=True):
            assert torch.equal(torch.stack(actual), expected)
        places, _, _ = planned
        rows_PSD = [torch.full_like(mine.rows.local, float("nan")) for mine in arrays]
        for rank, mine in enumerate(arrays):
            push_rows(batch.x_PTD[rank], places[rank], mine.rows, rank)
            push_rows_reference(batch.x_PTD[rank], places[rank], rows_PSD)
        for rank, mine in enumerate(arrays):
            assert torch.equal(mine.rows.local.nan_to_num(7), rows_PSD[rank].nan_to_num(7))
            assert torch.equal(pull_rows(places[rank], mine.rows), pull_rows_reference(rows_PSD, places[rank]))
            assert (bytes_past(mine) == 255).all()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("max_rows", [0, 5])
def test_symm_reference_has_no_place_for_rows_without_room(num_ranks: int, max_rows: int) -> None:
    """The first rows of a rank, by source and token, have places; the rest has none, and the flag is up."""
    torch.manual_seed(num_ranks)
    batch = draw("skewed", num_ranks, 13, 8, "cpu", torch.float32)
    places_PTP, num_rows_P, overflowed_P = place_copies_reference(batch.ids_PTK, NUM_LOCAL, max_rows)
    for rank in range(num_ranks):
        wanted = wanted_rows(batch.ids_PTK, rank)
        placed = {(s, t): places_PTP[s, t, rank].item() for s in range(num_ranks) for t in range(13)}
        assert {pair: row for pair, row in placed.items() if row >= 0} == {
            pair: row for row, pair in enumerate(wanted[:max_rows])
        }
        assert num_rows_P[rank] == min(max_rows, len(wanted)) and overflowed_P[rank] == (len(wanted) > max_rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("routing", ["skewed", "all_to_one_rank"])
def test_symm_choices_of_rows_without_room_go_nowhere(routing: str, device: str) -> None:
    """Ids, scores and rows of what has a place arrive; what has none is neither written anywhere nor read."""
    torch.manual_seed(0)
    batch, max_rows = draw(routing, 4, 13, 8, device, torch.float32), 9
    arrays = share_memory(4, 13, 8, device, torch.float32, max_rows)
    places, num_rows, overflowed = plan(batch, arrays)
    assert any(overflowed) and max(num_rows) == max_rows
    for rank, mine in enumerate(arrays):
        push_choices(batch.ids_PTK[rank], batch.scores_PTK[rank], places[rank], mine, rank, NUM_LOCAL)
    received = push(batch.x_PTD, places, num_rows, arrays)
    for rank, mine in enumerate(arrays):
        wanted = wanted_rows(batch.ids_PTK, rank)[:max_rows]
        _, scores_SK = take_choices(mine, num_rows[rank])
        for row, (source, token) in enumerate(wanted):
            assert torch.equal(scores_SK[row], batch.scores_PTK[source, token])
            assert torch.equal(received[rank][row], batch.x_PTD[source, token])
        assert received[rank][len(wanted) :].isnan().all() and (bytes_past(mine) == 255).all()
    # on the way home a choice whose row never went finds nothing, and no NaN of what was never written
    for rank, (ids_TK, places_TP) in enumerate(zip(batch.ids_PTK, places, strict=True)):
        ranks_TK = torch.where(ids_TK < 0, 0, ids_TK // NUM_LOCAL).long()
        went_TK = (ids_TK >= 0) & (places_TP.gather(1, ranks_TK) >= 0)
        expected = torch.where(went_TK, batch.scores_PTK[rank], 0)
        assert torch.equal(pull_scores(ids_TK, places_TP, arrays[rank].scores, NUM_LOCAL), expected)
        assert pull_rows(places_TP, arrays[rank].rows).isfinite().all()


def test_symm_memory_that_is_too_small_is_refused() -> None:
    memory = torch.empty(symm_bytes(2, 4, 8, TOP_K, torch.float32), dtype=torch.uint8)
    symm_arrays(memory, torch.zeros(2, dtype=torch.int64), 8, 8, TOP_K, torch.float32)
    with pytest.raises(ValueError, match="1000 rows from 2 ranks"):
        symm_arrays(memory, torch.zeros(2, dtype=torch.int64), 1000, 8, TOP_K, torch.float32)
