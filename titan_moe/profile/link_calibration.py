"""Messages among ranks, for the step-time model: gathers and reductions, rows, small messages, nodes.

Bytes are those that a rank receives; the slowest rank counts. All ranks stay in step: the first one says whether there
is time, and a message for which a rank lacks memory is left out by all.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.plan.cost.rates_file import of_bytes
from titan_moe.profile.calibration_progress import Progress, in_words

CALLS = 10
KIND, COLD_S = "message", 6.0
"""What a group's first message may take: NCCL connects its ranks."""
# torch 2.13 renamed them, and warns of the old names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Call = Callable[[], Any]


class Message(NamedTuple):
    """A collective operation of a size."""

    rate: str
    shape: Mapping[str, int]
    received: float  # bytes
    prepare: Callable[[], Call]
    """Allocates on this rank, and returns the operation."""


def measure_links(progress: Progress, message: int, small: int, row_width: int) -> None:
    """Collective. `message` and `small` are elements in bf16."""
    for it in messages_of(progress.device, message, small, row_width):
        _measure(progress, it)


def messages_of(device: torch.device, message: int, small: int, row_width: int) -> Iterator[Message]:
    """Those in a node, of as many ranks as this one has, and those between nodes. Collective: groups are made."""
    rank, world = dist.get_rank(), dist.get_world_size()
    of_node = min(int(os.environ.get("LOCAL_WORLD_SIZE", world)), world)
    if of_node > 1:
        groups = [dist.new_group([*range(first, first + of_node)]) for first in range(0, world, of_node)]
        group = groups[rank // of_node]
        yield from _in_node(device, group, of_node, message, small, row_width)
    if world > of_node:
        size = world // of_node
        across = [dist.new_group([*range(local, world, of_node)]) for local in range(of_node)]
        yield _all_to_all(device, across[rank % of_node], size, message // size * size, "node_link")


def _in_node(
    device: torch.device, group: Any, size: int, message: int, small: int, row_width: int
) -> Iterator[Message]:
    own = message // size
    yield _gather(device, group, size, own, "link")
    if device.type == "cuda":  # gloo has none into one tensor
        shape = {"reduce_scatter": own * size, "ranks": size}
        yield Message("link", shape, 2.0 * own * (size - 1), lambda: _reduce(device, group, size, own))
    yield _all_to_all(device, group, size, own * size, "link")
    yield _rows(device, group, size, own * size // row_width // size * size, row_width)
    yield _gather(device, group, size, small // size, "split_collectives")


def _gather(device: torch.device, group: Any, size: int, own: int, rate: str) -> Message:
    def prepare() -> Call:
        part, gathered = _half(device, own), _half(device, own * size)
        return lambda: all_gather(gathered, part, group=group)

    return Message(rate, {"all_gather": own * size, "ranks": size}, 2.0 * own * (size - 1), prepare)


def _reduce(device: torch.device, group: Any, size: int, own: int) -> Call:
    part, whole = _half(device, own), _half(device, own * size)
    return lambda: reduce_scatter(part, whole, group=group)


def _all_to_all(device: torch.device, group: Any, size: int, elements: int, rate: str) -> Message:
    def prepare() -> Call:
        sent, got = _half(device, elements), _half(device, elements)
        return lambda: dist.all_to_all_single(got, sent, group=group)

    return Message(rate, {"all_to_all": elements, "ranks": size}, 2.0 * elements * (size - 1) / size, prepare)


def _rows(device: torch.device, group: Any, size: int, rows: int, width: int) -> Message:
    """Rows by all-to-all, with the passes that sort them before and after."""

    def prepare() -> Call:
        x_SD, got_SD = _half(device, rows, width), _half(device, rows, width)
        order_S = torch.randperm(rows, device=device)

        def call() -> Tensor:
            dist.all_to_all_single(got_SD, x_SD.index_select(0, order_S), group=group)
            return got_SD.index_select(0, order_S)

        return call

    shape = {"rows": rows, "width": width, "ranks": size}
    return Message("collective_rows", shape, 2.0 * rows * width * (size - 1) / size, prepare)


def _measure(progress: Progress, it: Message) -> None:
    """Collective: all ranks measure a message, or none."""
    device, start, words = progress.device, time.monotonic(), f"{it.rate} by {next(iter(it.shape))}"
    no_time, why, call, ms = progress.lacks_time(KIND, COLD_S), "another rank could not", None, 0.0
    if not _all_agree(device, not (progress.is_first and no_time)):
        progress.leave_out(words, no_time)
        return
    try:
        call = it.prepare()
    except Exception as error:  # no memory
        why = in_words(error)
    if is_measured := _all_agree(device, call is not None):
        assert call is not None, "all ranks have prepared the message"
        try:
            ms = _ms(device, call)
        except Exception as error:  # which all ranks meet alike: a backend that has no such message
            why = in_words(error)
        is_measured = _all_agree(device, ms > 0)
    if not is_measured:
        progress.leave_out(words, why)
        return
    slowest = torch.tensor([ms], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    progress.took[KIND] = time.monotonic() - start
    progress.add([of_bytes(it.rate, it.shape, float(slowest), it.received)], progress.took[KIND])


def _all_agree(device: torch.device, is_so: bool) -> bool:
    """Whether it is so on all ranks."""
    agreed = torch.tensor([int(is_so)], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed.item())


def _ms(device: torch.device, call: Call) -> float:
    """Of a collective call on this rank. All ranks call as often: a clock of one would part them."""
    for _ in range(3):
        call()
    _synchronize(device)
    _all_agree(device, True)
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    _synchronize(device)
    return max(1e3 * (time.perf_counter() - start) / CALLS, 1e-3)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _half(device: torch.device, *sizes: int) -> Tensor:
    return torch.randn(sizes, device=device, dtype=torch.bfloat16)
