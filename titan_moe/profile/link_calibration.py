"""Measure messages among ranks, for the step-time model: gathers and reductions, rows, small messages, nodes.

Bytes are those that a rank receives; the slowest rank counts.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.plan.cost.rates_file import Measurement, of_bytes

CALLS = 10
# torch 2.13 renamed them, and warns of the old names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measure_links(device: torch.device, message: int, small: int, row_width: int) -> Iterator[Measurement]:
    """Collective: all ranks measure, and all return the same. `message` and `small` are elements in bf16."""
    rank, world = dist.get_rank(), dist.get_world_size()
    of_node = min(int(os.environ.get("LOCAL_WORLD_SIZE", world)), world)
    groups = [dist.new_group([*range(first, first + of_node)]) for first in range(0, world, of_node)]
    across = [dist.new_group([*range(local, world, of_node)]) for local in range(of_node)]
    if of_node > 1:
        group = groups[rank // of_node]
        yield from _in_node(device, group, of_node, message, small, row_width)
    if world > of_node:
        size = world // of_node
        yield _all_to_all(device, across[rank % of_node], size, message // size * size, "node_link")


def _in_node(
    device: torch.device, group: Any, size: int, message: int, small: int, row_width: int
) -> Iterator[Measurement]:
    own, whole = message // size, message // size * size
    part, gathered = _half(device, own), _half(device, whole)
    received = 2.0 * own * (size - 1)
    gather = _ms(device, lambda: all_gather(gathered, part, group=group))
    yield of_bytes("link", {"all_gather": whole, "ranks": size}, gather, received)
    if device.type == "cuda":  # gloo has none into one tensor
        reduce = _ms(device, lambda: reduce_scatter(part, gathered, group=group))
        yield of_bytes("link", {"reduce_scatter": whole, "ranks": size}, reduce, received)
    yield _all_to_all(device, group, size, whole, "link")
    yield _rows(device, group, size, whole // row_width // size * size, row_width)
    few = small // size
    out, own_small = _half(device, few * size), _half(device, few)
    seconds = _ms(device, lambda: all_gather(out, own_small, group=group))
    yield of_bytes("split_collectives", {"all_gather": few * size, "ranks": size}, seconds, 2.0 * few * (size - 1))


def _all_to_all(device: torch.device, group: Any, size: int, elements: int, rate: str) -> Measurement:
    sent, got = _half(device, elements), _half(device, elements)
    ms = _ms(device, lambda: dist.all_to_all_single(got, sent, group=group))
    return of_bytes(rate, {"all_to_all": elements, "ranks": size}, ms, 2.0 * elements * (size - 1) / size)


def _rows(device: torch.device, group: Any, size: int, rows: int, width: int) -> Measurement:
    """Rows by all-to-all, with the passes that sort them before and after."""
    x_SD, got_SD = _half(device, rows, width), _half(device, rows, width)
    order_S = torch.randperm(rows, device=device)

    def call() -> Tensor:
        dist.all_to_all_single(got_SD, x_SD.index_select(0, order_S), group=group)
        return got_SD.index_select(0, order_S)

    shape = {"rows": rows, "width": width, "ranks": size}
    return of_bytes("collective_rows", shape, _ms(device, call), 2.0 * rows * width * (size - 1) / size)


def _ms(device: torch.device, call: Callable[[], Any]) -> float:
    """Of a collective call, on the slowest rank."""
    for _ in range(3):
        call()
    _synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    _synchronize(device)
    ms = torch.tensor([1e3 * (time.perf_counter() - start) / CALLS], dtype=torch.float64, device=device)
    dist.all_reduce(ms, op=dist.ReduceOp.MAX)
    return max(float(ms), 1e-3)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _half(device: torch.device, *sizes: int) -> Tensor:
    return torch.randn(sizes, device=device).to(torch.bfloat16)
