"""Symmetric-memory dispatcher with bounded capacity: rows without room are not sent, and the flag is set."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from support import load
from torch import Tensor

from titan_moe.dispatch import capacity as capacity_module
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.symm_mem.dispatcher import SymmMemDispatcher

equal_local, symm_mem = load("dispatch/test_equal_local"), load("dispatch/symm_mem/test_dispatcher")


def is_short_of_rows(dispatcher: SymmMemDispatcher, drawn: list[Tensor]) -> bool:
    """Whether more rows are routed to this rank than it has room for."""
    return bool(dispatcher.prepare(*drawn[1:3]).plan.overflowed)


def run_bounded_and_unbounded(folder: str | None) -> list[tuple[int, int, bool, bool, Tensor]]:
    """For each routing, bounded and unbounded: rows that a rank has room for, rows received, whether more were routed
    to it, whether all its results are finite, and their largest error."""
    memory, device = symm_mem.share(folder)
    capacity = ExpertCapacity(1.0, device)
    dispatcher = SymmMemDispatcher(equal_local.NUM_EXPERTS, memory, capacity=capacity)
    module, results = symm_mem.my_experts(device), []
    for routing in ("all_to_one_rank", "one_rank_empty"):
        drawn = symm_mem.my_inputs(routing, device)
        for is_unbounded in (False, True):
            module.zero_grad()
            symm_mem.poison(memory)
            with capacity.unbounded() if is_unbounded else mock.patch.object(capacity_module, "SLOTS_ALIGNMENT", 1):
                results_of_rank = equal_local.serve(dispatcher, module, drawn)[:3]
                assert bool(capacity.overflowed) >= is_short_of_rows(dispatcher, drawn), "the overflow is recorded"
                capacity.reset()
                exchange = dispatcher.prepare(*drawn[1:3])
                is_short = bool(exchange.plan.overflowed)
                num_rows = dispatcher.finish_dispatch(
                    dispatcher.start_dispatch(drawn[0], exchange), exchange
                ).x_SD.shape[0]
            expected = equal_local.dense_oracle(tuple(tensor.cpu() for tensor in drawn))[:3]
            errors = [
                (actual.cpu() - reference).abs().max()
                for actual, reference in zip(results_of_rank, expected, strict=True)
            ]
            is_finite = all(bool(tensor.isfinite().all()) for tensor in results_of_rank)
            num_received = int(exchange.plan.recv_offsets_Q[-1])
            results.append((num_rows, num_received, is_short, is_finite, torch.stack(errors).max()))
    return results


def check_bounded_and_unbounded(answers: list[list[tuple[int, int, bool, bool, Tensor]]]) -> None:
    """With the bound there is room for the rows of random routing; without it, for exactly the rows received."""
    worst = len(answers) * equal_local.NUM_TOKENS
    for rank, (full, full_unbounded, empty, empty_unbounded) in enumerate(answers):
        assert full[0] == empty[0] < worst
        assert full_unbounded[0] == full_unbounded[1] and empty_unbounded[0] == empty_unbounded[1]
        # all rows are routed to rank 0, and only rank 0 reports it
        assert full[1:3] == ((full[0], True) if rank == 0 else (0, False))
        assert full_unbounded[1:3] == ((worst, False) if rank == 0 else (0, False))
        assert empty[1] <= empty[0] and not empty_unbounded[2]
        assert all(is_finite for _, _, _, is_finite, _ in answers[rank])
        assert max(full_unbounded[4], empty_unbounded[4]) < 1e-11
    assert max(full[4] for full, *_ in answers) > 1e-3, "results of rows without room are missing"


@pytest.mark.interpreted
def test_symm_mem_over_files_does_not_send_rows_without_room(ranks, tmp_path: Path) -> None:
    check_bounded_and_unbounded(ranks(2, run_bounded_and_unbounded, str(tmp_path)))


@pytest.mark.gpu
@symm_mem.needs_gpus
@pytest.mark.parametrize("num_ranks", symm_mem.RANKS)
def test_symm_mem_over_gpus_does_not_send_rows_without_room(ranks_of_a_size, num_ranks: int) -> None:
    check_bounded_and_unbounded(ranks_of_a_size(num_ranks, run_bounded_and_unbounded, None))
