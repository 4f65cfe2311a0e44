"""Measure what a GPU and its links reach, for the step-time model: `titan-moe calibrate`.

Some twenty shapes: a copy, GEMMs of linear layers and of experts in bf16 and fp8, attention; among ranks messages in a
node and between nodes. Random data; medians of kernels alone, hosts left out. Measuring takes 0.2 s a shape, and Triton
a minute and a half for the kernels of four shapes of experts that are not in its cache: several ranks share them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_moe.config import RecipeError
from titan_moe.kernels.device import compute_capability, device_name
from titan_moe.kernels.experts.fp8.format import FP8_ROWWISE
from titan_moe.kernels.experts.fused_mlp import FusedMLP, with_scores_first
from titan_moe.kernels.permute.rows import plan_slots
from titan_moe.kernels.registry import KERNELS, Sample
from titan_moe.kernels.timing import Stopwatch, forward_and_total_ms, median_ms, replayed_ms
from titan_moe.plan.cost.rates import Rates
from titan_moe.plan.cost.rates_file import Measurement, of_attention, of_bytes, of_experts, of_linear
from titan_moe.profile.calibration_progress import Progress, Save, Task
from titan_moe.profile.link_calibration import measure_links

FP8_FROM = (9, 0)
"""The compute capability from which fp8 is measured."""
OF_COPIES = 0.96
"""The rate of passes of many tensors over that of a copy of one (tools/results/kernels.md)."""


class Shapes(NamedTuple):
    """What is measured."""

    elements: int  # of a copy
    rows: int
    widths: tuple[tuple[int, int], ...]  # inputs and outputs of linear layers
    experts: tuple[tuple[int, int, int, int, int], ...]  # rows, experts, choices, width, hidden
    heads: int
    head_width: int
    lengths: tuple[int, ...]
    message: int  # elements of a large message
    small: int  # of one of tp or cp
    row_width: int


FULL = Shapes(
    elements=2**28,
    rows=16_384,
    widths=((2048, 5120), (4096, 2048), (7168, 18_432), (2048, 32_768)),
    experts=((16_384, 16, 8, 2048, 768), (8192, 32, 8, 7168, 2048)),
    heads=32,
    head_width=128,
    lengths=(4096, 16_384),
    message=2**28,
    small=2**24,
    row_width=4096,
)
TINY = Shapes(2**12, 48, ((24, 40),), ((16, 3, 2, 24, 16),), 3, 8, (32,), 2**12, 2**8, 16)
"""For tests on a CPU."""

COLD_S, COLD_ATTENTION_S, COLD_EXPERTS_S = 2.0, 6.0, 25.0
"""What a kernel may take where nothing is compiled: cuDNN compiles attention, and Triton some ten kernels of experts,
whose widths are constants in them."""

ExpertShape = tuple[int, int, int, int, int]


def require_gpu() -> None:
    """Refuse a host without a GPU.

    Raises: RecipeError.
    """
    if not torch.cuda.is_available():
        raise RecipeError(
            ["titan-moe calibrate measures a GPU, and torch finds none here; run it on a host like those of the plan"]
        )


def calibrate(
    device: torch.device,
    seconds: float,
    shapes: Shapes = FULL,
    began: float | None = None,
    save: Save = lambda _: None,
) -> str:
    """Measure, and return a table of rates as TOML; `save` takes what there is after each measurement, on the first
    rank. With a process group of several ranks links are measured too.

    Kernels that need no time to compile come first, then links, then experts. What would end more than `seconds` after
    `began`, by the clock of `time.monotonic`, is left out.
    """
    progress = Progress(device, seconds, time.monotonic() if began is None else began, save)
    left = f"{progress.seconds_left:.0f} of {seconds:.0f} s are left after the start"
    progress.tell(f"measuring {device_name(device)}, {progress.num_ranks} rank(s): {left}")
    for task in _tasks_of_kernels(device, shapes) if progress.is_first else ():
        progress.run(task)
    if progress.num_ranks > 1:
        measure_links(progress, shapes.message, shapes.small, shapes.row_width)
    memory = next((it.value for it in progress.measured if it.rate == "memory"), Rates().memory)
    tasks = _tasks_of_experts(device, shapes, memory)
    if not progress.is_first:
        rank, others = dist.get_rank(), progress.num_ranks - 1
        _compile(progress, tasks[:0:-1][rank - 1 :: others])
        tasks = []
    for task in tasks:
        progress.run(task)
    return progress.table(is_complete=True)


def _compile(progress: Progress, tasks: Sequence[Task]) -> None:
    """Run what the first rank measures last, so that its kernels are in Triton's cache by then."""
    for task in tasks:
        if not progress.lacks_time(task.kind, task.cold_s):
            with suppress(Exception):  # the first rank meets and tells it
                task.measure(0.0)


def _tasks_of_kernels(device: torch.device, shapes: Shapes) -> Iterator[Task]:
    """Kernels of one device but those of experts. Tensors of one shape are freed before those of the next exist."""
    yield Task("a copy", COLD_S, partial(_copy, device, shapes.elements), "copy")
    for has_codes in (False, True) if _has_fp8(device) else (False,):
        for widths in shapes.widths:
            words = f"{'fp8' if has_codes else 'bf16'} linear {widths[0]} x {widths[1]}"
            measure = partial(_linear, device, shapes.rows, widths, has_codes)
            yield Task(words, COLD_S, measure, "linear")
    for length in shapes.lengths:
        words = f"attention of {length} tokens"
        yield Task(words, COLD_ATTENTION_S, partial(_attention, device, length, shapes), "attention")


def _tasks_of_experts(device: torch.device, shapes: Shapes, memory: float) -> list[Task]:
    """Experts in both formats, a shape after the other, where memory has this rate."""
    formats = (False, True) if _has_fp8(device) else (False,)
    memory = memory if device.type == "cuda" else 1e30
    return [
        Task(
            f"{'fp8' if has_codes else 'bf16'} experts {shape[3]} x {shape[4]}",
            COLD_EXPERTS_S,
            partial(_experts, device, shape, has_codes, memory),
            "experts",
        )
        for shape in shapes.experts
        for has_codes in formats
    ]


def _has_fp8(device: torch.device) -> bool:
    return (compute_capability(device) or (0, 0)) >= FP8_FROM


def _stopwatch(device: torch.device, timed_ms: float, *, is_replayed: bool) -> Stopwatch:
    """Of kernels alone on a GPU; of the host elsewhere, and for a call that is not timed."""
    if device.type != "cuda" or not timed_ms:
        return _host_ms
    return partial(replayed_ms if is_replayed else median_ms, least_ms=timed_ms)


def _host_ms(call: Callable[[], Any]) -> float:
    call()
    start = time.perf_counter()
    call()
    return max(1e3 * (time.perf_counter() - start), 1e-3)


def _half(device: torch.device, *sizes: int) -> Tensor:
    return torch.randn(sizes, device=device, dtype=torch.bfloat16)


def _copy(device: torch.device, elements: int, timed_ms: float) -> list[Measurement]:
    source = _half(device, elements)
    target = torch.empty_like(source)
    ms = _stopwatch(device, timed_ms, is_replayed=False)(lambda: target.copy_(source))
    return [of_bytes("memory", {"elements": elements}, ms, OF_COPIES * 4 * elements)]


def _linear(
    device: torch.device, rows: int, widths: tuple[int, int], has_codes: bool, timed_ms: float
) -> list[Measurement]:
    x_RI, weight_OI = _half(device, rows, widths[0]), _half(device, widths[1], widths[0])
    if has_codes:
        x_RI, weight_OI = (it.to(torch.float8_e4m3fn) for it in (x_RI, weight_OI))
    scales = torch.ones(rows, 1, device=device), torch.ones(1, widths[1], device=device)
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}

    def multiply() -> Tensor:
        return torch._scaled_mm(x_RI, weight_OI.T, *scales, **options) if has_codes else F.linear(x_RI, weight_OI)

    ms = _stopwatch(device, timed_ms, is_replayed=False)(multiply)
    return [of_linear(rows, widths, ms, has_codes=has_codes)]


def _experts(
    device: torch.device, shape: ExpertShape, has_codes: bool, memory: float, timed_ms: float
) -> list[Measurement]:
    """Forward and backward of fused experts, balanced."""
    rows, number, choices, width, hidden = shape
    ids_SK = (torch.arange(rows * choices, device=device) % number).view(rows, choices)
    plan = plan_slots(ids_SK, number, ids_SK.numel())[:3]
    gate_up, down = _half(device, number, 2, hidden, width) / width**0.5, _half(device, number, width, hidden)
    leaves = _half(device, rows, width), torch.rand(rows, choices, device=device), gate_up, down / hidden**0.5
    kernel = KERNELS["fused_expert_mlp"]
    if device.type != "cuda":
        leaves, op = tuple(leaf.float() for leaf in leaves), kernel.reference
    else:
        op = with_scores_first(FusedMLP(FP8_ROWWISE)) if has_codes else kernel.op
    stopwatch = _stopwatch(device, timed_ms, is_replayed=True)
    ms = forward_and_total_ms(op, Sample("", (*leaves, *plan), 4), stopwatch)[1]
    return [of_experts(rows, rows * choices, number, (width, hidden), ms, memory, has_codes=has_codes)]


def _attention(device: torch.device, length: int, shapes: Shapes, timed_ms: float) -> tuple[Measurement, ...]:
    """Forward, and backward."""
    qkv = tuple(_half(device, 1, shapes.heads, length, shapes.head_width) for _ in range(3))
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with sdpa_kernel(backends, set_priority=True):
        stopwatch = _stopwatch(device, timed_ms, is_replayed=True)
        forward, both = forward_and_total_ms(attention, Sample("", qkv, 3), stopwatch)
    return of_attention(length, shapes.heads, shapes.head_width, forward, max(both, 1.001 * forward))
