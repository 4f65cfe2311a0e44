"""Kernels that exchange rows over symmetric memory. One process runs all ranks, phase by phase.

Running a phase for all ranks before the next replaces the barriers. The same runs on one GPU.
"""

from typing import NamedTuple

import pytest
import torch
from support import arenas
from torch import Tensor

from titan_moe.kernels.symm_mem.arrays import SymmArrays, signal_bytes, symm_arrays, symm_bytes
from titan_moe.kernels.symm_mem.assignments import get_assignments, own_scores, pick_scores, put_scores
from titan_moe.kernels.symm_mem.row_plan import RowPlan, exchange_counts, plan_rows, plan_rows_reference
from titan_moe.kernels.symm_mem.rows import (
    get_rows,
    get_rows_reference,
    own_rows,
    put_rows,
    sum_partial_results,
    sum_partial_results_reference,
)

NUM_LOCAL, TOP_K = 2, 3
ROUTINGS = ("balanced", "skewed", "one_rank_empty", "all_to_one_rank", "dropped_choices", "nobody")
LAYERS = [*((routing, p) for routing in ROUTINGS for p in (2, 4)), ("all_to_one_rank", 8), ("dropped_choices", 8)]
DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


class Batch(NamedTuple):
    """Inputs of all ranks: rows, expert ids, scores and a gradient of the result."""

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
    if routing == "all_to_one_rank":  # to the last rank: its local experts, -1 for the rest
        ids_PTK = torch.where(ids_PTK.argsort(-1) < NUM_LOCAL, num_experts - 1 - ids_PTK.argsort(-1), -1)
    if routing == "dropped_choices":
        ids_PTK = torch.where(torch.rand(ids_PTK.shape, device=device) < 0.5, -1, ids_PTK)
    if routing == "nobody":
        ids_PTK = torch.full_like(ids_PTK, -1)
    ids_PTK = torch.where(ids_PTK < num_experts, ids_PTK, -1)
    x_PTD, dy_PTD = (torch.randn(num_ranks, num_tokens, width, device=device).to(dtype) for _ in range(2))
    return Batch(x_PTD, ids_PTK, torch.rand(ids_PTK.shape, device=device), dy_PTD)


def share_memory(num_ranks: int, num_tokens: int, width: int, device: str, dtype: torch.dtype) -> list[SymmArrays]:
    """Every rank's arrays, filled with bytes of 255 but for the signals: NaN as floats, -1 as integers."""
    size = symm_bytes(num_ranks, num_tokens, width, TOP_K, dtype)
    memories = [torch.full((size,), 255, dtype=torch.uint8, device=device) for _ in range(num_ranks)]
    for memory in memories:
        memory[: signal_bytes(num_ranks)].zero_()
    peer_ptrs_P = torch.tensor([memory.data_ptr() for memory in memories], device=device)
    return [symm_arrays(memory, peer_ptrs_P, num_tokens, width, TOP_K, dtype) for memory in memories]


def plan(batch: Batch, arrays: list[SymmArrays], max_rows: int | None = None) -> list[RowPlan]:
    max_rows = batch.ids_PTK.shape[0] * batch.ids_PTK.shape[1] if max_rows is None else max_rows
    starts = [
        exchange_counts(ids, mine, rank, NUM_LOCAL)
        for rank, (ids, mine) in enumerate(zip(batch.ids_PTK, arrays, strict=True))
    ]
    return [
        plan_rows(ids, start, mine, rank, NUM_LOCAL, max_rows)
        for rank, (ids, start, mine) in enumerate(zip(batch.ids_PTK, starts, arrays, strict=True))
    ]


def get(x_PTD: Tensor, plans: list[RowPlan], arrays: list[SymmArrays], max_rows: int) -> list[Tensor]:
    for x_TD, mine in zip(x_PTD, arrays, strict=True):
        own_rows(mine.rows).copy_(x_TD)
    return [get_rows(p, mine.rows, rank, max_rows) for rank, (p, mine) in enumerate(zip(plans, arrays, strict=True))]


def put(y_PSD: list[Tensor], plans: list[RowPlan], arrays: list[SymmArrays]) -> list[Tensor]:
    for rank, (y_SD, p, mine) in enumerate(zip(y_PSD, plans, arrays, strict=True)):
        put_rows(y_SD, p, mine.rows, rank)
    return [sum_partial_results(p.sent_mask_TP, mine.rows) for p, mine in zip(plans, arrays, strict=True)]


def routed_rows(ids_PTK: Tensor, rank: int) -> list[tuple[int, int]]:
    """(source, token) of each row that is routed to a rank, in order, by a plain loop."""
    first = rank * NUM_LOCAL
    return [
        (source, token)
        for source, ids_TK in enumerate(ids_PTK.tolist())
        for token, ids in enumerate(ids_TK)
        if any(first <= expert < first + NUM_LOCAL for expert in ids)
    ]


def check_received(
    batch: Batch, plans: list[RowPlan], arrays: list[SymmArrays], max_rows: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Get rows, ids and scores, and compare them, their order and their counts with the expected ones."""
    num_rows = [int(p.recv_offsets_Q[-1]) for p in plans]
    assert sum(p.sent_mask_TP.sum() for p in plans) == sum(num_rows)
    received = get(batch.x_PTD, plans, arrays, max_rows)
    for ids_TK, scores_TK, mine in zip(batch.ids_PTK, batch.scores_PTK, arrays, strict=True):
        mine.ids.local.copy_(ids_TK)
        own_scores(mine.scores).copy_(scores_TK)
    answers = []
    for rank, (p, mine) in enumerate(zip(plans, arrays, strict=True)):
        routed, first = routed_rows(batch.ids_PTK, rank)[:max_rows], rank * NUM_LOCAL
        ids_SK, scores_SK = get_assignments(p, mine, rank, NUM_LOCAL, max_rows)
        count = num_rows[rank]
        assert count == len(routed) and (ids_SK[count:] == -1).all() and not scores_SK[count:].any()
        if routed:
            sources, tokens = torch.tensor(routed, device=ids_SK.device).unbind(1)
            assert torch.equal(received[rank][:count], batch.x_PTD[sources, tokens])
            assert torch.equal(scores_SK[:count], batch.scores_PTK[sources, tokens])
            expected = batch.ids_PTK[sources, tokens] - first
            expected = torch.where((expected >= 0) & (expected < NUM_LOCAL), expected, -1)
            assert torch.equal(ids_SK[:count], expected.int())
        answers.append((received[rank][:count], ids_SK[:count], scores_SK[:count]))
    return answers


def experts_of(x: Tensor, ids: Tensor, scores: Tensor, weights_E: Tensor) -> Tensor:
    """Expert e computes sin(w_e · x), so results of different experts and of several copies differ."""
    total = torch.zeros_like(x)
    for k in range(ids.shape[1]):
        weight = weights_E[ids[:, k].clamp(min=0)][:, None]
        total = total + torch.where((ids[:, k] >= 0)[:, None], scores[:, k, None] * (weight * x).sin(), 0)
    return total


def check_layer(batch: Batch, arrays: list[SymmArrays], tolerance: float) -> None:
    """A layer forward and backward, against a layer without an exchange."""
    max_rows = batch.x_PTD.shape[0] * batch.x_PTD.shape[1]
    weights_E = torch.linspace(0.5, 2, len(arrays) * NUM_LOCAL, device=batch.x_PTD.device)
    plans = plan(batch, arrays)
    assert not any(p.overflowed for p in plans)
    computed = []
    for rank, (x_SD, ids_SK, scores_SK) in enumerate(check_received(batch, plans, arrays, max_rows)):
        x_SD, scores_SK = x_SD.float().requires_grad_(), scores_SK.clone().requires_grad_()
        weights_e = weights_E[rank * NUM_LOCAL : (rank + 1) * NUM_LOCAL]
        computed.append((x_SD, scores_SK, experts_of(x_SD, ids_SK, scores_SK, weights_e)))

    def padded(rows: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The received rows, and NaN past the last one."""
        outs = [row.new_full((max_rows, row.shape[1]), float("nan"), dtype=dtype) for row in rows]
        for out, row in zip(outs, rows, strict=True):
            out[: len(row)] = row.detach()
        return outs

    dtype = batch.x_PTD.dtype
    y_PTD = torch.stack(put(padded([y for _, _, y in computed], dtype), plans, arrays))
    dy = get(batch.dy_PTD, plans, arrays, max_rows)
    for (_, _, y_SD), dy_SD in zip(computed, dy, strict=True):
        y_SD.backward(dy_SD[: len(y_SD)].float())
    for rank, dscores_SK in enumerate(padded([s.grad for _, s, _ in computed], torch.float32)):
        put_scores(dscores_SK, plans[rank], arrays[rank].scores, rank)
    dx_PTD = torch.stack(put(padded([x.grad for x, _, _ in computed], dtype), plans, arrays))
    dscores_PTK = torch.stack(
        [
            pick_scores(ids, p.sent_mask_TP, mine.scores, NUM_LOCAL)
            for ids, p, mine in zip(batch.ids_PTK, plans, arrays, strict=True)
        ]
    )
    x, scores = batch.x_PTD.flatten(0, 1).float().requires_grad_(), batch.scores_PTK.flatten(0, 1).requires_grad_()
    y = experts_of(x, batch.ids_PTK.flatten(0, 1), scores, weights_E)
    y.backward(batch.dy_PTD.flatten(0, 1).float())
    for actual, expected in ((y_PTD, y), (dx_PTD, x.grad), (dscores_PTK, scores.grad)):
        torch.testing.assert_close(actual.flatten(0, 1).float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("routing", "num_ranks"), LAYERS)
def test_symm_mem_layer_equals_local_layer(routing: str, num_ranks: int, device: str) -> None:
    """Two layers in the same memory: the second one overwrites what the first has left."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(num_ranks)
    num_tokens, width = int(torch.randint(1, 12, ())), 8 + num_ranks
    arrays = share_memory(num_ranks, num_tokens, width, device, dtype)
    for _ in range(2):
        batch = draw(routing, num_ranks, num_tokens, width, device, dtype)
        check_layer(batch, arrays, 1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_symm_mem_plan_of_many_blocks(num_ranks: int, device: str) -> None:
    """More tokens than one program counts, numbers of ranks that are no power of two, and int32 ids."""
    torch.manual_seed(0)
    batch = draw("balanced", num_ranks, 300, 4, device, torch.float32)
    arrays = share_memory(num_ranks, 300, 4, device, torch.float32)
    plans = plan(batch._replace(ids_PTK=batch.ids_PTK.int()), arrays)
    check_received(batch, plans, arrays, 300 * num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_symm_mem_references_equal_plain_loop(routing: str, num_ranks: int) -> None:
    """The plan in plain torch against a plain loop, get and put against a sum over copies."""
    torch.manual_seed(num_ranks)
    batch, max_rows = draw(routing, num_ranks, 13, 8, "cpu", torch.float32), 13 * num_ranks
    plans = plan_rows_reference(batch.ids_PTK, NUM_LOCAL, max_rows)
    assert not any(p.overflowed for p in plans)
    received = [get_rows_reference(list(batch.x_PTD), p, max_rows) for p in plans]
    for rank, (x_SD, p) in enumerate(zip(received, plans, strict=True)):
        routed = routed_rows(batch.ids_PTK, rank)
        assert p.recv_offsets_Q[-1] == len(routed) and not x_SD[len(routed) :].any()
        for row, (source, token) in enumerate(routed):
            assert torch.equal(x_SD[row], batch.x_PTD[source, token]) and plans[source].sent_mask_TP[token, rank]
    results = sum_partial_results_reference(received, plans, 13)
    for x_TD, y_TD, p in zip(batch.x_PTD, results, plans, strict=True):
        torch.testing.assert_close(y_TD, x_TD * p.sent_mask_TP.sum(1, keepdim=True))


@pytest.mark.parametrize("device", DEVICES)
def test_symm_mem_kernels_equal_references(device: str) -> None:
    """Plans, rows and sums bit for bit, for many plans, half of which may have too little room."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for seed in range(42 if device == "cpu" else 1000):
        torch.manual_seed(seed)
        num_ranks, routing = (2, 2, 2, 4, 4, 8)[seed % 6], ROUTINGS[seed // 6 % len(ROUTINGS)]
        num_tokens = int(torch.randint(0, 12, ()))
        batch = draw(routing, num_ranks, num_tokens, 8, device, dtype)
        max_rows = num_tokens * num_ranks
        max_rows = max_rows if seed % 2 else int(torch.randint(0, max_rows + 1, ()))
        arrays = share_memory(num_ranks, num_tokens, 8, device, dtype)
        plans, expected = plan(batch, arrays, max_rows), plan_rows_reference(batch.ids_PTK, NUM_LOCAL, max_rows)
        for mine, reference in zip(plans, expected, strict=True):
            for name in ("sent_mask_TP", "recv_offsets_Q", "overflowed"):
                assert torch.equal(getattr(mine, name), getattr(reference, name)), name
            is_defined = reference.recv_tokens_PT >= 0
            assert torch.equal(mine.recv_tokens_PT[is_defined], reference.recv_tokens_PT[is_defined])
        received = get(batch.x_PTD, plans, arrays, max_rows)
        for x_SD, p in zip(received, plans, strict=True):
            reference = get_rows_reference(list(batch.x_PTD), p, max_rows)
            assert torch.equal(x_SD[: p.recv_offsets_Q[-1]], reference[: p.recv_offsets_Q[-1]])
        results = put(received, plans, arrays)
        for actual, reference in zip(results, sum_partial_results_reference(received, plans, num_tokens), strict=True):
            assert torch.equal(actual, reference)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("max_rows", [0, 5])
def test_symm_mem_reference_plan_drops_rows_without_room(num_ranks: int, max_rows: int) -> None:
    """The first rows by source and token are sent to a rank; the rest is not, and the flag is set."""
    torch.manual_seed(num_ranks)
    batch = draw("skewed", num_ranks, 13, 8, "cpu", torch.float32)
    plans = plan_rows_reference(batch.ids_PTK, NUM_LOCAL, max_rows)
    for rank, p in enumerate(plans):
        routed = routed_rows(batch.ids_PTK, rank)
        sent = [(s, t) for s in range(num_ranks) for t in range(13) if plans[s].sent_mask_TP[t, rank]]
        assert sent == routed[:max_rows]
        assert p.recv_offsets_Q[-1] == min(max_rows, len(routed)) and p.overflowed == (len(routed) > max_rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("routing", ["skewed", "all_to_one_rank"])
def test_symm_mem_rows_without_room_are_not_exchanged(routing: str, device: str) -> None:
    """Ids, scores and rows that have room are received. The rest is neither got nor put nor read."""
    torch.manual_seed(0)
    batch, max_rows = draw(routing, 4, 13, 8, device, torch.float32), 9
    arrays = share_memory(4, 13, 8, device, torch.float32)
    plans = plan(batch, arrays, max_rows)
    assert any(p.overflowed for p in plans) and max(p.recv_offsets_Q[-1] for p in plans) == max_rows
    received = check_received(batch, plans, arrays, max_rows)
    for mine in arrays:  # an assignment whose row was not sent gets a zero, not the NaN of its entry
        mine.rows.local.fill_(float("nan"))
        mine.scores.local.fill_(float("nan"))
    for rank, (_, _, scores_SK) in enumerate(received):
        put_scores(scores_SK.contiguous(), plans[rank], arrays[rank].scores, rank)
    results = put([x_SD.contiguous() for x_SD, _, _ in received], plans, arrays)
    for rank, (ids_TK, p) in enumerate(zip(batch.ids_PTK, plans, strict=True)):
        ranks_TK = torch.where(ids_TK < 0, 0, ids_TK // NUM_LOCAL).long()
        is_sent_TK = (ids_TK >= 0) & p.sent_mask_TP.gather(1, ranks_TK)
        expected = torch.where(is_sent_TK, batch.scores_PTK[rank], 0)
        assert torch.equal(pick_scores(ids_TK, p.sent_mask_TP, arrays[rank].scores, NUM_LOCAL), expected)
        torch.testing.assert_close(results[rank], batch.x_PTD[rank] * p.sent_mask_TP.sum(1, keepdim=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("routing", ["skewed", "nobody"])
def test_symm_mem_rows_are_got_into_those_of_several_layers(routing: str, device: str) -> None:
    torch.manual_seed(0)
    batch, max_rows = draw(routing, 4, 13, 8, device, torch.float32), 4 * 13
    arrays = share_memory(4, 13, 8, device, torch.float32)
    plans = plan(batch, arrays)
    received = get(batch.x_PTD, plans, arrays, max_rows)
    for rank, (p, mine, x_SD) in enumerate(zip(plans, arrays, received, strict=True)):
        x_SD[p.recv_offsets_Q[-1] :] = float("nan")
        out = arenas.surround(torch.full_like(x_SD, float("nan")), arenas.ROW)
        assert get_rows(p, mine.rows, rank, max_rows, out=out, base=arenas.base(device)) is out
        assert arenas.same_bits(out, arenas.surround(x_SD, arenas.ROW))
        out = torch.full_like(x_SD, float("nan"))
        assert arenas.same_bits(get_rows(p, mine.rows, rank, max_rows, out=out), x_SD)
        with pytest.raises(ValueError, match="out"):
            get_rows(p, mine.rows, rank, max_rows, base=arenas.base(device))


def test_symm_arrays_refuse_too_little_memory() -> None:
    memory = torch.empty(symm_bytes(2, 4, 8, TOP_K, torch.float32), dtype=torch.uint8)
    symm_arrays(memory, torch.zeros(2, dtype=torch.int64), 4, 8, TOP_K, torch.float32)
    with pytest.raises(ValueError, match="1000 tokens on each of 2 ranks"):
        symm_arrays(memory, torch.zeros(2, dtype=torch.int64), 1000, 8, TOP_K, torch.float32)
