"""Asynchronous collectives: bit-equal to the synchronous ones in both directions, with work between start and wait."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _get_work_registry_size
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from titan_moe.dispatch.async_collectives import ASYNC
from titan_moe.dispatch.collectives import SYNC, Collectives

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
SPLITS = {
    "balanced": [[2] * 4 for _ in range(4)],
    "uneven": [[source + target for target in range(4)] for source in range(4)],
    "one_rank_sends_nothing": [[0 if source == 2 else 3 for _ in range(4)] for source in range(4)],
    "one_rank_gets_nothing": [[0 if target == 1 else source for target in range(4)] for source in range(4)],
    "nothing_at_all": [[0] * 4 for _ in range(4)],
}
"""Number of rows that each rank (first index) sends to each rank."""


def forward_and_backward(
    collectives: Collectives, kind: str, x: Tensor, args: tuple[Any, ...], *, is_recomputed: bool = False
) -> list[Tensor]:
    """Result and gradients of a collective with work before, between start and wait, and after."""
    start, wait = getattr(collectives, kind)

    def work(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        pending = start(x * 2, *args)
        aside = (x * weight).sin()
        return wait(pending, *args) * 3, aside

    x = x.clone().requires_grad_(x.is_floating_point())
    weight = torch.full((), 0.5, dtype=x.dtype, requires_grad=x.is_floating_point())
    y, aside = checkpoint(work, x, weight, use_reentrant=False) if is_recomputed else work(x, weight)
    if not x.is_floating_point():
        return [y]
    torch.autograd.backward([y, aside], [torch.randn_like(y), torch.randn_like(aside)])
    assert x.grad.dtype == x.dtype
    return [y.detach(), aside.detach(), x.grad, weight.grad]


def async_equals_sync(kind: str, x: Tensor, args: tuple[Any, ...], **how: bool) -> bool:
    results = []
    for collectives in (SYNC, ASYNC):
        torch.manual_seed(dist.get_rank())
        results.append(forward_and_backward(collectives, kind, x, args, **how))
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*results, strict=True))


def compare_async_with_sync(is_recomputed: bool) -> tuple[dict[str, bool], int]:
    """Whether synchronous and asynchronous results are equal, by case; number of collectives not waited for."""
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    same = {}
    for dtype in (*DTYPES, torch.int32):
        generator = torch.Generator().manual_seed(rank)
        for name, splits in SPLITS.items():
            sent, received = splits[rank], [row[rank] for row in splits]
            x = (torch.randn(sum(sent), 3, generator=generator) * 9).to(dtype)
            same[f"all_to_all {dtype} {name}"] = async_equals_sync(
                "all_to_all", x, (received, sent, group), is_recomputed=is_recomputed
            )
        x = (torch.randn(5, num_ranks * 5, generator=generator) * 9).to(dtype).T  # strided
        for kind in ("all_gather", "reduce_scatter") if dtype.is_floating_point else ("all_gather",):
            same[f"{kind} {dtype}"] = async_equals_sync(kind, x, (group,), is_recomputed=is_recomputed)
    return same, _get_work_registry_size()


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["once", "recomputed"])
def test_async_collectives_equal_sync_bitwise_and_are_all_waited_for(ranks, is_recomputed: bool) -> None:
    for same, num_open in ranks(4, compare_async_with_sync, is_recomputed):
        assert same and all(same.values()), [name for name, is_same in same.items() if not is_same]
        assert num_open == 0


class OpRecorder(TorchDispatchMode):
    """Record the names of `known` ops that run, in order, repetitions once."""

    def __init__(self, known: dict[str, str]) -> None:
        super().__init__()
        self.known, self.names = known, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.known.get(func.overloadpacket._qualified_op_name.replace("::", "."))
        if name and [name] != self.names[-1:]:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def collectives_of_async_gather() -> list[str]:
    """The functional collectives of an asynchronous all-gather."""
    start, wait = ASYNC.all_gather
    names = ("all_gather_into_tensor", "all_to_all_single")
    with OpRecorder({"_c10d_functional." + name: name for name in names}) as ran:
        rows = wait(start(torch.full((2, 3), dist.get_rank()), dist.group.WORLD), dist.group.WORLD)
    assert rows[:, 0].tolist() == [0, 0, 1, 1]
    return ran.names


def test_async_all_gather_on_gloo_is_all_to_all(ranks) -> None:
    """Three pending functional all-gathers of gloo end in a double free within 20,000 rounds (torch 2.11, 2.13)."""
    assert ranks(2, collectives_of_async_gather) == [["all_to_all_single"]] * 2
