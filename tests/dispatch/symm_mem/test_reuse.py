"""Every exchange reuses the symmetric memory: loops, interleaved microbatches, a slow rank."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import load
from torch import Tensor

from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.symm_mem import dispatcher as symm_mem_module
from titan_moe.dispatch.symm_mem.dispatcher import SymmMemDispatcher

equal_local, symm_mem = load("dispatch/test_equal_local"), load("dispatch/symm_mem/test_dispatcher")


def stress(folder: str | None, num_dispatches: int) -> int:
    """Number of tokens whose result is not the sum of their copies, over many routings."""
    memory, device = symm_mem.share(folder)
    dispatcher = SymmMemDispatcher(equal_local.NUM_EXPERTS, memory, capacity=ExpertCapacity(2.0, device))
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    x_TD = torch.randn(equal_local.NUM_TOKENS, equal_local.WIDTH, generator=generator, device=device)
    per_rank = equal_local.NUM_EXPERTS // dist.get_world_size()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(num_dispatches):
        scores_TE = torch.rand(len(x_TD), equal_local.NUM_EXPERTS, generator=generator, device=device)
        scores_TK, ids_TK = scores_TE.topk(equal_local.TOP_K)
        routed = dispatcher.dispatch(x_TD, ids_TK, scores_TK)
        y_TD = dispatcher.combine(routed.x_SD, routed)
        ranks_TK = ids_TK // per_rank
        copies_T1 = torch.stack([(ranks_TK == p).any(1) for p in range(dist.get_world_size())]).sum(0)[:, None]
        wrong += ((y_TD - x_TD * copies_T1).abs() > 1e-5).any(1).sum()
    return int(wrong)


def interleave(folder: str | None) -> list[Tensor]:
    """Two microbatches interleaved, so that each kind of exchange follows one of its kind; numbers of wrong elements of
    y, dx and dscores."""
    memory, device = symm_mem.share(folder)
    dispatcher = SymmMemDispatcher(equal_local.NUM_EXPERTS, memory)
    microbatches = [symm_mem.my_inputs(routing, device) for routing in ("random", "skewed")]
    for x_TD, _, scores_TK, _ in microbatches:
        x_TD.requires_grad_(), scores_TK.requires_grad_()
    exchanges = [dispatcher.prepare(ids_TK, scores_TK) for _, ids_TK, scores_TK, _ in microbatches]
    arrived = [
        dispatcher.finish_dispatch(dispatcher.start_dispatch(microbatch[0], exchange), exchange)
        for microbatch, exchange in zip(microbatches, exchanges, strict=True)
    ]
    results = [dispatcher.combine(routed.x_SD, routed) for routed in arrived]
    scores = [routed.scores_R[: routed.offsets_e[-1]] for routed in arrived]
    grads = [grad_TD for _, _, _, grad_TD in microbatches] + [torch.full_like(placed, 2) for placed in scores]
    torch.autograd.backward([*results, *scores], grads)
    wrong = []
    for (x_TD, ids_TK, scores_TK, grad_TD), y_TD in zip(microbatches, results, strict=True):
        ranks_TK = ids_TK // (equal_local.NUM_EXPERTS // dist.get_world_size())
        copies_T1 = torch.stack([(ranks_TK == p).any(1) for p in range(dist.get_world_size())]).sum(0)[:, None]
        pairs = ((y_TD, x_TD * copies_T1), (x_TD.grad, grad_TD * copies_T1), (scores_TK.grad, 2 + 0 * scores_TK))
        wrong += [(actual.isclose(expected).logical_not()).sum().cpu() for actual, expected in pairs]
    return wrong


def interleave_beside_a_slow_rank(folder: str, slow_rank: int) -> list[Tensor]:
    """`interleave`, where one rank sleeps before each of its kernels."""

    def delay(launch: Callable[..., Any]) -> Callable[..., Any]:
        def slow_launch(*args: Any) -> Any:
            time.sleep(0.1 * (dist.get_rank() == slow_rank))
            return launch(*args)

        return slow_launch

    with pytest.MonkeyPatch.context() as patched:
        for name in (
            "exchange_counts",
            "plan_rows",
            "own_rows",
            "get_rows",
            "get_assignments",
            "put_rows",
            "sum_partial_results",
        ):
            patched.setattr(symm_mem_module, name, delay(getattr(symm_mem_module, name)))
        return interleave(folder)


@pytest.mark.interpreted
def test_symm_mem_over_files_dispatches_in_a_loop(ranks, tmp_path: Path) -> None:
    assert ranks(2, stress, str(tmp_path), 20) == [0, 0]


@pytest.mark.interpreted
def test_symm_mem_over_files_waits_for_a_slow_rank(ranks, tmp_path: Path) -> None:
    """The arrays of a rank that writes or reads late are not read or overwritten too early."""
    for slow_rank in (0, 1):
        folder = tmp_path / str(slow_rank)
        folder.mkdir()
        for wrong in ranks(2, interleave_beside_a_slow_rank, str(folder), slow_rank):
            assert not any(wrong)


@pytest.mark.gpu
@symm_mem.needs_gpus
@pytest.mark.parametrize("num_ranks", symm_mem.RANKS)
def test_symm_mem_over_gpus_interleaves_two_microbatches(ranks_of_a_size, num_ranks: int) -> None:
    for wrong in ranks_of_a_size(num_ranks, interleave, None):
        assert not any(wrong)


@pytest.mark.gpu
@symm_mem.needs_gpus
@pytest.mark.parametrize("num_ranks", symm_mem.RANKS)
def test_symm_mem_over_gpus_dispatches_10000_times(ranks_of_a_size, num_ranks: int) -> None:
    assert ranks_of_a_size(num_ranks, stress, None, 10_000) == [0] * num_ranks
