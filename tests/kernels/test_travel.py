"""Rows that travel beside the GEMMs that want them: the same bits as rows that have arrived.

All ranks are in one process, each phase for all of them before the next, as in test_symm_dispatch.py.
"""

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.expert_up import expert_up
from titan_moe.kernels.gather_mm import gather_mm
from titan_moe.kernels.permute import plan_slots
from titan_moe.kernels.slot_mm import slot_mm
from titan_moe.kernels.slot_sum import slot_sum
from titan_moe.kernels.symm_dispatch_rows import deliver_rows, fetch_rows, sum_deliveries
from titan_moe.kernels.symm_orders import RowOrders, order_rows, order_rows_reference
from titan_moe.kernels.tiles import Tiles, plan_tiles
from titan_moe.kernels.travel import Movers


def _neighbour(name: str) -> Any:
    """A module of this folder."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


symm = _neighbour("test_symm_dispatch")
LAYERS = [("balanced", 1), *symm.LAYERS]
WIDTH, HIDDEN = 64, 40
FEW = Movers(3, 128)  # each with several blocks of few rows
NARROW = Movers(5, 16)  # of a row in pieces


class Rank(NamedTuple):
    """What a rank knows before rows come."""

    arrays: Any
    plan: Any
    rows_R: Tensor
    slots_SK: Tensor
    scores_R: Tensor
    offsets_e: Tensor
    tiles: Tiles
    orders: RowOrders


def prepare(batch: Any, num_slots: int | None = None) -> list[Rank]:
    """Plans, slots and orders of all ranks; their rows lie ready to be fetched."""
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
        orders = order_rows(rows_R, slots_SK, tiles, plan, mine.rows, rank)
        scores_R = torch.rand(num_slots, device=rows_R.device)
        ranks.append(Rank(mine, plan, rows_R, slots_SK, scores_R, offsets_e, tiles, orders))
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
        fetched, delivered, wanted = order_rows_reference(mine.rows_R, mine.slots_SK, mine.tiles)
        count = int(mine.orders.count)
        assert mine.orders.fetched_S[:count].tolist() == fetched
        slots = [[slot for slot in mine.slots_SK[row].tolist() if slot >= 0] for row in delivered]
        assert mine.orders.lengths_S[:count].tolist() == [len(own) for own in slots]
        summed = mine.orders.summed_SK[:count].tolist()
        assert [own[: len(real)] for own, real in zip(summed, slots, strict=True)] == slots
        assert mine.orders.wanted_M.tolist() == wanted


@pytest.mark.parametrize("device", symm.DEVICES)
@pytest.mark.parametrize(
    ("routing", "num_ranks", "movers"), [("balanced", 1, NARROW), ("skewed", 2, FEW), ("one_rank_empty", 4, FEW)]
)
def test_gemms_take_rows_as_they_come(routing: str, num_ranks: int, movers: Movers, device: str) -> None:
    batch = draw(routing, num_ranks, device)
    dtype = batch.x_PTD.dtype
    up = torch.randn(symm.NUM_LOCAL, 2, HIDDEN, WIDTH, device=device).to(dtype)
    down = torch.randn(symm.NUM_LOCAL, WIDTH, HIDDEN, device=device).to(dtype)
    for rank, mine in enumerate(prepare(batch)):
        max_rows, end = len(mine.slots_SK), mine.offsets_e[-1]
        x_SD = fetch_rows(mine.plan, mine.arrays.rows, rank, max_rows)
        there = expert_up(x_SD, mine.rows_R, mine.scores_R, up, mine.tiles)
        coming_SD = torch.full_like(x_SD, float("nan"))
        come = expert_up(coming_SD, mine.rows_R, mine.scores_R, up, mine.tiles, orders=mine.orders, movers=movers)
        assert all(same_slots(a, b, end) for a, b in zip(come, there, strict=True))
        has_slots_S = (mine.slots_SK >= 0).any(1)
        assert torch.equal(coming_SD[has_slots_S], x_SD[has_slots_S])
        coming_SD = torch.full_like(x_SD, float("nan"))
        come = gather_mm(coming_SD, mine.rows_R, down, mine.tiles, orders=mine.orders, movers=movers)
        assert same_slots(come, gather_mm(x_SD, mine.rows_R, down, mine.tiles), end)


@pytest.mark.parametrize("device", symm.DEVICES)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    ("routing", "num_ranks", "movers"), [("balanced", 1, NARROW), ("skewed", 2, FEW), ("one_rank_empty", 4, FEW)]
)
def test_sums_leave_when_their_slots_are_done(
    routing: str, num_ranks: int, movers: Movers, is_transposed: bool, device: str
) -> None:
    batch = draw(routing, num_ranks, device)
    dtype, ranks = batch.x_PTD.dtype, prepare(batch)
    shape = (symm.NUM_LOCAL, WIDTH, HIDDEN) if is_transposed else (symm.NUM_LOCAL, HIDDEN, WIDTH)
    weight = torch.randn(shape, device=device).to(dtype)
    active = [torch.randn(len(mine.rows_R), HIDDEN, device=device).to(dtype) for mine in ranks]
    for rank, (mine, active_RF) in enumerate(zip(ranks, active, strict=True)):
        y_RD = slot_mm(active_RF, weight, mine.tiles, is_transposed=is_transposed)
        begin = 0
        for expert, end in enumerate(mine.offsets_e.tolist()):
            matrix = weight[expert].T if is_transposed else weight[expert]
            expected = active_RF[begin:end].double() @ matrix.double()
            torch.testing.assert_close(
                y_RD[begin:end].double(),
                expected,
                rtol=2e-2,
                atol=2e-2 * expected.abs().max().item() if expected.numel() else 0,
            )
            begin = end
        deliver_rows(slot_sum(y_RD, mine.slots_SK), mine.plan, mine.arrays.rows, rank)
    expected = [sum_deliveries(mine.plan.went_TP, mine.arrays.rows) for mine in ranks]
    for mine in ranks:
        mine.arrays.rows.local.fill_(float("nan"))
    for mine, active_RF in zip(ranks, active, strict=True):
        slot_mm(active_RF, weight, mine.tiles, is_transposed=is_transposed, orders=mine.orders, movers=movers)
    for mine, home_TD in zip(ranks, expected, strict=True):
        assert torch.equal(sum_deliveries(mine.plan.went_TP, mine.arrays.rows), home_TD)
