"""A rank that does not come to an exchange over symmetric memory is named by all others, and nothing hangs.

On CPU ranks are processes that map each other's files, as in symm_mem/test_dispatcher.py, and a limit is counted
in polls; on GPUs it is a clock's.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import load

from titan_moe.dispatch import missing_rank
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.missing_rank import MissingRank
from titan_moe.dispatch.symm_mem.dispatcher import SymmMemDispatcher
from titan_moe.kernels.symm_mem import barrier
from titan_moe.kernels.symm_mem.arrays import symm_arrays

symm_mem = load("dispatch/symm_mem/test_dispatcher")
NAMES = [10, 20, 30, 40, 50, 60, 70, 80]
"""Ranks of a group need not be the first of a run."""


def stay_away(folder: str | None, limit_seconds: float) -> dict[str, Any]:
    """The last rank misses a barrier and comes to the next one late: what each rank is told before and after, how long
    its own barrier took, and what a plan holds that is made then."""
    memory, device = symm_mem.share(folder)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    missing = MissingRank(memory.local, NAMES[:num_ranks])
    signals = symm_arrays(memory.local, memory.peer_ptrs_P, 1, 0, 0, torch.float32).signals
    dispatcher = SymmMemDispatcher(symm_mem.equal_local.NUM_EXPERTS, memory)
    _, ids_TK, scores_TK, _ = symm_mem.my_inputs("random", device)

    def wait_for_device() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    answer: dict[str, Any] = {}
    plan = dispatcher.prepare(ids_TK, scores_TK).plan  # all come, and what must compile has
    wait_for_device()
    answer["rows"], answer["early"] = int(plan.recv_offsets_Q[-1]), missing.message
    missing.set_limit(limit_seconds)
    wait_for_device()
    dist.barrier()
    if rank < num_ranks - 1:
        begin = time.monotonic()
        barrier.symm_barrier(signals, rank)
        wait_for_device()
        answer["seconds"], answer["message"] = time.monotonic() - begin, missing.message
    dist.barrier()
    begin = time.monotonic()
    for _ in range(3):  # the late one's first would be the others' last
        plan = dispatcher.prepare(ids_TK, scores_TK).plan
    wait_for_device()
    answer["late_seconds"], answer["late_message"] = time.monotonic() - begin, missing.message
    answer["late_rows"], answer["failed"] = int(plan.recv_offsets_Q[-1]), int(missing.failed)
    try:
        missing.check()
    except RuntimeError as error:  # no `pytest.raises`: what keeps `missing` alive lets it end this process
        answer["error"] = str(error)
    dist.barrier()
    return answer


def check_stay_away(answers: list[dict[str, Any]], limit_seconds: float) -> None:
    num_ranks = len(answers)
    told = f"rank {NAMES[num_ranks - 1]} did not come to an exchange over symmetric memory within {limit_seconds:g} s"
    for answer in answers:
        assert not answer["early"] and answer["rows"] > 0, "nothing is wrong while all come"
        assert answer["late_message"].startswith(told) and answer["failed"] == num_ranks
        assert answer["error"] == answer["late_message"]
        assert answer["late_rows"] == 0, "stale lists are not read"
    for answer in answers[:-1]:
        assert answer["message"].startswith(told)


@pytest.mark.interpreted
def test_files_name_the_rank_that_stays_away(ranks, tmp_path: Path) -> None:
    check_stay_away(ranks(4, stay_away, str(tmp_path), 0.1), 0.1)


@pytest.mark.gpu
@symm_mem.needs_gpus
@pytest.mark.parametrize("num_ranks", symm_mem.RANKS)
def test_gpus_name_the_rank_that_stays_away(ranks_of_a_size, num_ranks: int) -> None:
    answers = ranks_of_a_size(num_ranks, stay_away, None, 1.0)
    check_stay_away(answers, 1.0)
    for answer in answers[:-1]:
        assert 0.9 < answer["seconds"] < 3.0
    assert all(answer["late_seconds"] < 1.0 for answer in answers), "barriers after the first do not wait as long"


def test_a_failed_exchange_invalidates_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_rank, "Thread", mock.Mock())  # it would end the process of these tests
    capacity = ExpertCapacity(1.5)
    assert not capacity.invalidates_step
    missing = MissingRank(torch.zeros(64, dtype=torch.uint8), [0, 1])
    capacity.failed, capacity.check = missing.failed, missing.check
    assert not capacity.invalidates_step and capacity.check() is None
    missing.failed.fill_(2), missing.word.fill_(2)
    for _ in range(2):
        assert capacity.invalidates_step
        capacity.reset()
    with pytest.raises(RuntimeError, match="rank 1 did not come .* see its log"):
        capacity.check()


def test_a_process_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The main thread may wait for the missing rank in a collective, for ever."""
    monkeypatch.setattr(missing_rank, "SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(missing_rank, "SECONDS_TO_END", 0.5)
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    missing, other = (MissingRank(torch.zeros(64, dtype=torch.uint8), [4, 5]) for _ in range(2))
    with caplog.at_level("CRITICAL", logger="titan_moe"):
        time.sleep(0.1)
        assert not caplog.records and not codes
        missing.word.fill_(1), other.word.fill_(2)
        wait_until(lambda: len(caplog.records) == 2)
        del other  # its run has ended
        wait_until(lambda: bool(codes))
        time.sleep(0.4)
    assert sorted(record.message[:11] for record in caplog.records) == ["rank 4 did ", "rank 5 did "]
    assert codes == [1]


def wait_until(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
