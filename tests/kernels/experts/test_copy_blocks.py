"""Rows that travel beside the GEMMs that want them: the same bits as rows that have arrived.

All ranks are in one process, each phase for all of them before the next, as in symm_mem/test_rows.py.
"""

from typing import Any, NamedTuple

import pytest
import torch
from support import arenas, load
from torch import Tensor

from titan_moe.kernels.experts import copy_blocks as copying
from titan_moe.kernels.experts.copy_blocks import CopyBlocks
from titan_moe.kernels.experts.gather_mm import gather_mm
from titan_moe.kernels.experts.slot_mm import slot_mm
from titan_moe.kernels.experts.slot_sum import slot_sum
from titan_moe.kernels.experts.tiles import GemmTiles, Tiles, plan_tiles
from titan_moe.kernels.experts.up import expert_up
from titan_moe.kernels.permute.rows import plan_slots
from titan_moe.kernels.symm_mem.arrays import signal_bytes, symm_arrays, symm_bytes
from titan_moe.kernels.symm_mem.row_plan import exchange_counts, plan_rows
from titan_moe.kernels.symm_mem.rows import get_rows, own_rows, put_rows, sum_partial_results
from titan_moe.kernels.symm_mem.tile_schedule import (
    TileSchedule,
    clear_rows_without_slots,
    schedule_tiles,
    schedule_tiles_reference,
)

symm = load("kernels/symm_mem/test_rows")
LAYERS = [("balanced", 1), ("skewed", 2), ("nobody", 2), ("dropped_choices", 4), ("all_to_one_rank", 8)]
WIDTH, HIDDEN = 64, 40
FEW = CopyBlocks(3, 128)  # each with several blocks of few rows
NARROW = CopyBlocks(5, 16)  # of a row in pieces


class Rank(NamedTuple):
    """What a rank knows before rows come."""

    arrays: Any
    plan: Any
    rows_R: Tensor
    slots_SK: Tensor
    scores_R: Tensor
    offsets_e: Tensor
    tiles: Tiles
    schedule: TileSchedule


def prepare(batch: Any, num_slots: int | None = None) -> list[Rank]:
    """Plans, slots and schedule of all ranks; their rows lie ready to be fetched."""
    num_ranks, num_tokens, width = batch.x_PTD.shape
    arrays = symm.share_memory(num_ranks, num_tokens, width, batch.x_PTD.device, batch.x_PTD.dtype)
    plans, ranks = symm.plan(batch, arrays), []
    max_rows = num_ranks * num_tokens
    received = symm.check_received(batch, plans, arrays, max_rows)
    for rank, (mine, plan, (_, ids_SK, _)) in enumerate(zip(arrays, plans, received, strict=True)):
        ids_SK = torch.cat([ids_SK, ids_SK.new_full((max_rows - len(ids_SK), ids_SK.shape[1]), -1)])
        num_slots = num_slots or max_rows * symm.NUM_LOCAL
        rows_R, slots_SK, offsets_e, _ = plan_slots(ids_SK, symm.NUM_LOCAL, num_slots)
        tiles = plan_tiles(offsets_e, num_slots, 128, rank, num_ranks)
        schedule = schedule_tiles(rows_R, slots_SK, tiles, plan, mine.rows, mine.rows, rank)
        scores_R = torch.rand(num_slots, device=rows_R.device)
        ranks.append(Rank(mine, plan, rows_R, slots_SK, scores_R, offsets_e, tiles, schedule))
    return ranks


def draw(routing: str, num_ranks: int, device: str, num_tokens: int = 24) -> Any:
    torch.manual_seed(num_ranks)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return symm.draw(routing, num_ranks, num_tokens, WIDTH, device, dtype)


def same_slots(actual_RX: Tensor, expected_RX: Tensor, end: Tensor) -> bool:
    return torch.equal(actual_RX[: int(end)], expected_RX[: int(end)])


@pytest.mark.parametrize("device", symm.DEVICES)
@pytest.mark.parametrize(("routing", "num_ranks"), LAYERS)
def test_rows_are_ordered_by_their_slots(routing: str, num_ranks: int, device: str) -> None:
    for mine in prepare(draw(routing, num_ranks, device)):
        fetched, delivered, wanted = schedule_tiles_reference(mine.rows_R, mine.slots_SK, mine.tiles)
        count = int(mine.schedule.count)
        assert mine.schedule.get_rows_S[:count].tolist() == fetched
        slots = [[slot for slot in mine.slots_SK[row].tolist() if slot >= 0] for row in delivered]
        assert mine.schedule.put_num_slots_S[:count].tolist() == [len(own) for own in slots]
        summed = mine.schedule.put_slots_SK[:count].tolist()
        assert [own[: len(real)] for own, real in zip(summed, slots, strict=True)] == slots
        num_tiles = int(mine.tiles.count)
        assert mine.schedule.required_rows_M[:num_tiles].tolist() == wanted[:num_tiles]


@pytest.mark.parametrize("device", symm.DEVICES)
@pytest.mark.parametrize(
    ("routing", "num_ranks", "copy_blocks"), [("balanced", 1, NARROW), ("skewed", 2, FEW), ("one_rank_empty", 4, FEW)]
)
def test_gemms_take_rows_as_they_come(routing: str, num_ranks: int, copy_blocks: CopyBlocks, device: str) -> None:
    batch = draw(routing, num_ranks, device)
    dtype = batch.x_PTD.dtype
    up = torch.randn(symm.NUM_LOCAL, 2, HIDDEN, WIDTH, device=device).to(dtype)
    down = torch.randn(symm.NUM_LOCAL, WIDTH, HIDDEN, device=device).to(dtype)
    for rank, mine in enumerate(prepare(batch)):
        max_rows, end = len(mine.slots_SK), mine.offsets_e[-1]
        x_SD = get_rows(mine.plan, mine.arrays.rows, rank, max_rows)
        there = expert_up(x_SD, mine.rows_R, mine.scores_R, up, mine.tiles)
        coming_SD = torch.full_like(x_SD, float("nan"))
        come = expert_up(
            coming_SD, mine.rows_R, mine.scores_R, up, mine.tiles, schedule=mine.schedule, copy_blocks=copy_blocks
        )
        assert all(same_slots(a, b, end) for a, b in zip(come, there, strict=True))
        has_slots_S = (mine.slots_SK >= 0).any(1)
        assert torch.equal(coming_SD[has_slots_S], x_SD[has_slots_S])
        coming_SD = torch.full_like(x_SD, float("nan"))
        come = gather_mm(coming_SD, mine.rows_R, down, mine.tiles, schedule=mine.schedule, copy_blocks=copy_blocks)
        assert same_slots(come, gather_mm(x_SD, mine.rows_R, down, mine.tiles), end)


@pytest.mark.parametrize("device", symm.DEVICES)
@pytest.mark.parametrize(
    ("routing", "num_ranks", "copy_blocks", "is_transposed"),
    [("balanced", 1, NARROW, True), ("skewed", 2, FEW, False), ("one_rank_empty", 4, FEW, True)],
)
def test_sums_leave_when_their_slots_are_done(
    routing: str, num_ranks: int, copy_blocks: CopyBlocks, is_transposed: bool, device: str
) -> None:
    batch = draw(routing, num_ranks, device)
    dtype, ranks = batch.x_PTD.dtype, prepare(batch)
    shape = (symm.NUM_LOCAL, WIDTH, HIDDEN) if is_transposed else (symm.NUM_LOCAL, HIDDEN, WIDTH)
    weight = torch.randn(shape, device=device).to(dtype)
    weight = weight.mT if is_transposed else weight
    active = [torch.randn(len(mine.rows_R), HIDDEN, device=device).to(dtype) for mine in ranks]
    for rank, (mine, active_RF) in enumerate(zip(ranks, active, strict=True)):
        y_RD = slot_mm(active_RF, weight, mine.tiles)
        begin = 0
        for expert, end in enumerate(mine.offsets_e.tolist()):
            expected = active_RF[begin:end].double() @ weight[expert].double()
            torch.testing.assert_close(
                y_RD[begin:end].double(),
                expected,
                rtol=2e-2,
                atol=2e-2 * expected.abs().max().item() if expected.numel() else 0,
            )
            begin = end
        put_rows(slot_sum(y_RD, mine.slots_SK), mine.plan, mine.arrays.rows, rank)
    expected = [sum_partial_results(mine.plan.sent_mask_TP, mine.arrays.rows) for mine in ranks]
    for mine in ranks:
        mine.arrays.rows.local.fill_(float("nan"))
    for mine, active_RF in zip(ranks, active, strict=True):
        slot_mm(active_RF, weight, mine.tiles, schedule=mine.schedule, copy_blocks=copy_blocks)
    for mine, home_TD in zip(ranks, expected, strict=True):
        assert torch.equal(sum_partial_results(mine.plan.sent_mask_TP, mine.arrays.rows), home_TD)


def crowded(device: str) -> tuple[Any, Tensor, Tensor]:
    """One rank of many groups of small tiles, whose rows have up to six slots and some none; x and its rows' places.

    Its tiles begin in the middle of each expert, and its width is no multiple of what a copy_block takes.
    """
    torch.manual_seed(0)
    dtype, num_tokens, num_choices, num_experts, width = torch.float32, 57, 6, 8, 72
    if device == "cuda":
        dtype, num_tokens = torch.bfloat16, 2057
    size = symm_bytes(1, num_tokens, width, num_choices, dtype)
    memory = torch.full((size,), 255, dtype=torch.uint8, device=device)
    memory[: signal_bytes(1)].zero_()
    arrays = symm_arrays(
        memory, torch.tensor([memory.data_ptr()], device=device), num_tokens, width, num_choices, dtype
    )
    ids_TK = torch.rand(num_tokens, num_experts, device=device).topk(num_choices).indices
    ids_TK = torch.where(torch.rand(ids_TK.shape, device=device) < 0.4, -1, ids_TK)
    ids_TK[1] = -1
    ids_TK[0] = torch.arange(num_choices, device=device)
    plan = plan_rows(ids_TK, exchange_counts(ids_TK, arrays, 0, num_experts), arrays, 0, num_experts, num_tokens)
    ids_SK = ids_TK[plan.recv_tokens_PT[0, : int(plan.recv_offsets_Q[-1])].long()]
    num_slots = int((ids_SK >= 0).sum()) - 5  # the last choices find no slot
    rows_R, slots_SK, offsets_e, overflowed = plan_slots(ids_SK, num_experts, num_slots)
    assert overflowed
    tiles = plan_tiles(offsets_e, num_slots, 16 if device == "cpu" else 64, 2, 5)
    schedule = schedule_tiles(rows_R, slots_SK, tiles, plan, arrays.rows, arrays.rows, 0)
    scores_R = torch.rand(num_slots, device=device)
    mine = Rank(arrays, plan, rows_R, slots_SK, scores_R, offsets_e, tiles, schedule)
    x_TD = torch.randn(num_tokens, width, device=device).to(dtype)
    return mine, x_TD, x_TD[plan.recv_tokens_PT[0, : len(ids_SK)].long()]


@pytest.mark.parametrize(("multiprocessors", "number"), [(None, 36), (132, 36), (33, 16)])
def test_copy_blocks_leave_half_of_the_multiprocessors_to_tiles(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int | None, number: int
) -> None:
    monkeypatch.setattr(copying, "num_multiprocessors", lambda device: multiprocessors)
    assert CopyBlocks(36, 8192).sizes(100_000, 2048, torch.device("cpu"))["COPY_BLOCKS"] == number


@pytest.mark.parametrize("device", symm.DEVICES)
@pytest.mark.parametrize("copy_blocks", [CopyBlocks(2, 512), CopyBlocks(40, 16)], ids=str)
def test_many_slots_tiles_and_pieces(copy_blocks: CopyBlocks, device: str) -> None:
    mine, x_TD, x_SD = crowded(device)
    dtype, num_experts, width = x_TD.dtype, len(mine.offsets_e), x_TD.shape[1]
    weight = torch.randn(num_experts, width, 40, device=device).to(dtype)
    own_rows(mine.arrays.rows).copy_(x_TD)
    coming_SD = torch.full_like(x_SD, float("nan"))
    cut = GemmTiles(outputs=128, group=2)
    come = gather_mm(coming_SD, mine.rows_R, weight, mine.tiles, cut, mine.schedule, copy_blocks)
    assert same_slots(come, gather_mm(x_SD, mine.rows_R, weight, mine.tiles, cut), mine.offsets_e[-1])
    has_slots_S = (mine.slots_SK >= 0).any(1)
    assert torch.equal(coming_SD[has_slots_S], x_SD[has_slots_S])
    active_RF = torch.randn(len(mine.rows_R), 40, device=device).to(dtype)
    y_RD = slot_mm(active_RF, weight.mT, mine.tiles, cut=GemmTiles(group=2))
    put_rows(slot_sum(y_RD, mine.slots_SK), mine.plan, mine.arrays.rows, 0)
    expected = sum_partial_results(mine.plan.sent_mask_TP, mine.arrays.rows)
    mine.arrays.rows.local.fill_(float("nan"))
    slot_mm(
        active_RF,
        weight.mT,
        mine.tiles,
        schedule=mine.schedule,
        copy_blocks=copy_blocks,
        cut=GemmTiles(group=2),
    )
    left_T = sum_partial_results(mine.plan.sent_mask_TP, mine.arrays.rows).isnan().any(1)
    assert int(left_T.sum()) == int((~has_slots_S).sum()), "who has no slot is not delivered"
    clear_rows_without_slots(mine.slots_SK, mine.plan, mine.arrays.rows, 0)
    assert torch.equal(sum_partial_results(mine.plan.sent_mask_TP, mine.arrays.rows), expected)


@pytest.mark.parametrize("device", symm.DEVICES)
@pytest.mark.parametrize("usual", [1, 7, None])
def test_thread_blocks_that_loop_over_tiles_take_and_put_rows_too(usual: int | None, device: str) -> None:
    """Of fewer tiles than there are, or of more, within a bound with room for many more."""
    mine, x_TD, x_SD = crowded(device)
    num_slots, dtype, rows = len(mine.rows_R), x_TD.dtype, mine.tiles.rows
    roomy = plan_tiles(mine.offsets_e, 3 * num_slots, rows, 2, 5)
    roomy = roomy._replace(usual=usual or int(roomy.count) + 1)
    assert roomy.looped() is not None
    schedule = schedule_tiles(mine.rows_R, mine.slots_SK, roomy, mine.plan, mine.arrays.rows, mine.arrays.rows, 0)
    num_rows = int(schedule.count)
    assert num_rows == int(mine.schedule.count)
    for actual, expected in zip(schedule[1:3], mine.schedule[1:3], strict=True):
        assert torch.equal(actual[:num_rows], expected[:num_rows])
    weight = torch.randn(len(mine.offsets_e), x_TD.shape[1], 40, device=device).to(dtype)
    both = torch.randn(len(mine.offsets_e), 2, 24, x_TD.shape[1], device=device).to(dtype)
    end, cut, copy_blocks = mine.offsets_e[-1], GemmTiles(outputs=16, group=2), CopyBlocks(3, 512)
    if device == "cuda":
        cut = GemmTiles(outputs=32, group=2)
    getting: Any = {"schedule": schedule, "copy_blocks": copy_blocks}

    own_rows(mine.arrays.rows).copy_(x_TD)
    expected_RO = gather_mm(x_SD, mine.rows_R, weight, mine.tiles, cut)
    assert same_slots(gather_mm(x_SD, mine.rows_R, weight, roomy, cut), expected_RO, end)
    coming_SD = torch.full_like(x_SD, float("nan"))
    assert same_slots(gather_mm(coming_SD, mine.rows_R, weight, roomy, cut, **getting), expected_RO, end)

    expected_up = expert_up(x_SD, mine.rows_R, mine.scores_R, both, mine.tiles, cut)
    for rows_SD, how in ((x_SD, {}), (torch.full_like(x_SD, float("nan")), getting)):
        actual_up = expert_up(rows_SD, mine.rows_R, mine.scores_R, both, roomy, cut, **how)
        assert all(same_slots(a, b, end) for a, b in zip(actual_up, expected_up, strict=True))

    active_RF = torch.randn(num_slots, 40, device=device).to(dtype)
    y_RD = slot_mm(active_RF, weight.mT, mine.tiles, cut=cut)
    assert same_slots(slot_mm(active_RF, weight.mT, roomy, cut=cut), y_RD, end)
    put_rows(slot_sum(y_RD, mine.slots_SK), mine.plan, mine.arrays.rows, 0)
    expected = sum_partial_results(mine.plan.sent_mask_TP, mine.arrays.rows)
    mine.arrays.rows.local.fill_(float("nan"))
    slot_mm(active_RF, weight.mT, roomy, **getting, cut=cut)
    clear_rows_without_slots(mine.slots_SK, mine.plan, mine.arrays.rows, 0)
    assert torch.equal(sum_partial_results(mine.plan.sent_mask_TP, mine.arrays.rows), expected)


@pytest.mark.parametrize("device", symm.DEVICES)
def test_without_a_slot_thread_blocks_that_loop_neither_work_nor_wait(device: str) -> None:
    batch = draw("nobody", 2, device)
    weight = torch.randn(symm.NUM_LOCAL, HIDDEN, WIDTH, device=device).to(batch.x_PTD.dtype)
    for rank, mine in enumerate(prepare(batch)):
        tiles = mine.tiles._replace(usual=1)
        schedule = schedule_tiles(
            mine.rows_R, mine.slots_SK, tiles, mine.plan, mine.arrays.rows, mine.arrays.rows, rank
        )
        assert int(schedule.count) == int(tiles.count) == 0
        rows, active_RF = (torch.zeros(len(mine.rows_R), width, device=device) for width in (WIDTH, HIDDEN))
        rows, active_RF = rows.to(weight.dtype), active_RF.to(weight.dtype)
        gather_mm(rows, mine.rows_R, weight.mT.contiguous(), tiles, schedule=schedule, copy_blocks=FEW)
        slot_mm(active_RF, weight, tiles, schedule=schedule, copy_blocks=FEW)


def test_no_slots_are_no_work() -> None:
    empty, none = (torch.zeros(size, dtype=torch.int32) for size in (2, 1))
    tiles = Tiles(empty, empty, empty, 128, none, 2)
    assert slot_mm(torch.zeros(0, 8), torch.zeros(2, 8, 16), tiles).shape == (0, 16)


@pytest.mark.parametrize("device", symm.DEVICES)
def test_rows_are_got_into_those_of_several_layers(device: str) -> None:
    """A base on the device changes no bit, and nothing is written but the layer's rows and slots."""
    batch = draw("skewed", 2, device)
    up = torch.randn(symm.NUM_LOCAL, 2, HIDDEN, WIDTH, device=device).to(batch.x_PTD.dtype)
    for mine in prepare(batch):
        x_SD = torch.full((len(mine.slots_SK), WIDTH), float("nan"), device=device, dtype=up.dtype)
        hidden_R2F = torch.full((len(mine.rows_R), 2 * HIDDEN), float("nan"), device=device, dtype=up.dtype)
        rows, hidden = arenas.surround(x_SD, arenas.ROW), arenas.surround(hidden_R2F, arenas.SLOT)
        args = (mine.rows_R, mine.scores_R, up, mine.tiles)
        getting: Any = {"schedule": mine.schedule, "copy_blocks": FEW}
        _, expected_RF = expert_up(x_SD, *args, **getting, hidden=hidden_R2F)
        _, active_RF = expert_up(rows, *args, **getting, hidden=hidden, base=arenas.base(device))
        assert same_slots(active_RF, expected_RF, mine.offsets_e[-1])
        assert not x_SD.isnan().all() and arenas.same_bits(rows, arenas.surround(x_SD, arenas.ROW))
        assert arenas.same_bits(hidden, arenas.surround(hidden_R2F, arenas.SLOT))
