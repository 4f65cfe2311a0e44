"""Measure what a GPU and its links reach, for the step-time model: `titan-moe calibrate`.

Some twenty shapes: a copy, GEMMs of linear layers and of experts in bf16 and fp8, attention; among ranks messages in a
node and between nodes. Random data; medians of kernels alone, hosts left out.
"""

import time
from collections.abc import Callable, Iterator
from datetime import date
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
from titan_moe.kernels.timing import forward_and_total_ms, median_ms, replayed_ms
from titan_moe.plan.cost.rates_file import Measurement, of_attention, of_bytes, of_experts, of_linear, written
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
    elements=2**29,
    rows=16_384,
    widths=((2048, 5120), (4096, 2048), (4096, 9216), (7168, 4096), (7168, 18_432), (2048, 32_768)),
    experts=(
        (16_384, 16, 8, 2048, 768),
        (16_384, 8, 6, 2048, 1408),
        (8192, 2, 2, 4096, 14_336),
        (8192, 32, 8, 7168, 2048),
    ),
    heads=32,
    head_width=128,
    lengths=(4096, 8192, 16_384),
    message=2**28,
    small=2**24,
    row_width=4096,
)
TINY = Shapes(2**12, 48, ((24, 40),), ((16, 3, 2, 24, 16),), 3, 8, (32,), 2**12, 2**8, 16)
"""For tests on a CPU."""

Timer = Callable[[Callable[[], Any]], float]
"""A call -> its milliseconds."""


def require_gpu() -> None:
    """Refuse a host without a GPU.

    Raises: RecipeError.
    """
    if not torch.cuda.is_available():
        raise RecipeError(
            ["titan-moe calibrate measures a GPU, and torch finds none here; run it on a host like those of the plan"]
        )


def calibrate(device: torch.device, shapes: Shapes = FULL) -> str:
    """Measure, and return a table of rates as TOML. With a process group of several ranks links are measured too."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    start = time.perf_counter()
    measured = [*measure_kernels(device, shapes)]
    if num_ranks > 1:
        measured += measure_links(device, shapes.message, shapes.small, shapes.row_width)
    heading = (
        f"titan-moe calibrate, {date.today().isoformat()}, torch {torch.__version__}, {num_ranks} rank(s), "
        f"{time.perf_counter() - start:.0f} s: titan-moe plan RECIPE.toml --rates FILE\n"
        "FLOP/s and bytes a second; without links, those of a shipped table or a data sheet are taken"
    )
    return written(device_name(device), measured, heading)


def timer_of(device: torch.device) -> Timer:
    """Of kernels alone on a GPU; of the host elsewhere."""
    return median_ms if device.type == "cuda" else _host_ms


def _host_ms(call: Callable[[], Any]) -> float:
    call()
    start = time.perf_counter()
    call()
    return max(1e3 * (time.perf_counter() - start), 1e-3)


def measure_kernels(device: torch.device, shapes: Shapes) -> Iterator[Measurement]:
    """Kernels of one device. Tensors of one shape are freed before those of the next exist."""
    timer = timer_of(device)
    copied = _copy(device, shapes.elements, timer)
    yield copied
    for widths in shapes.widths:
        yield of_linear(shapes.rows, widths, _linear_ms(device, shapes.rows, widths, timer), has_codes=False)
    has_fp8 = (compute_capability(device) or (0, 0)) >= FP8_FROM
    for widths in shapes.widths if has_fp8 else ():
        yield of_linear(shapes.rows, widths, _codes_ms(device, shapes.rows, widths, timer), has_codes=True)
    for has_codes in (False, True) if has_fp8 else (False,):
        for rows, number, choices, width, hidden in shapes.experts:
            ms = _experts_ms(device, (rows, number, choices, width, hidden), has_codes=has_codes)
            sizes = rows, rows * choices, number, (width, hidden)
            memory = copied.value if device.type == "cuda" else 1e30
            yield of_experts(*sizes, ms, memory, has_codes=has_codes)
    for length in shapes.lengths:
        yield from of_attention(length, shapes.heads, shapes.head_width, *_attention_ms(device, length, shapes))


def _half(device: torch.device, *sizes: int) -> Tensor:
    return torch.randn(sizes, device=device, dtype=torch.bfloat16)


def _copy(device: torch.device, elements: int, timer: Timer) -> Measurement:
    source = _half(device, elements)
    target = torch.empty_like(source)
    ms = timer(lambda: target.copy_(source))
    return of_bytes("memory", {"elements": elements}, ms, OF_COPIES * 4 * elements)


def _linear_ms(device: torch.device, rows: int, widths: tuple[int, int], timer: Timer) -> float:
    x_RI, weight_OI = _half(device, rows, widths[0]), _half(device, widths[1], widths[0])
    return timer(lambda: F.linear(x_RI, weight_OI))


def _codes_ms(device: torch.device, rows: int, widths: tuple[int, int], timer: Timer) -> float:
    x_RI, weight_OI = (_half(device, size, widths[0]).to(torch.float8_e4m3fn) for size in (rows, widths[1]))
    scales = torch.ones(rows, 1, device=device), torch.ones(1, widths[1], device=device)
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return timer(lambda: torch._scaled_mm(x_RI, weight_OI.T, *scales, **options))


def _experts_ms(device: torch.device, shape: tuple[int, int, int, int, int], *, has_codes: bool) -> float:
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
    stopwatch = replayed_ms if device.type == "cuda" else _host_ms
    return forward_and_total_ms(op, Sample("", (*leaves, *plan), 4), stopwatch)[1]


def _attention_ms(device: torch.device, length: int, shapes: Shapes) -> tuple[float, float]:
    """Forward, and forward with backward."""
    qkv = tuple(_half(device, 1, shapes.heads, length, shapes.head_width) for _ in range(3))
    stopwatch = replayed_ms if device.type == "cuda" else _host_ms
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with sdpa_kernel(backends, set_priority=True):
        forward, both = forward_and_total_ms(attention, Sample("", qkv, 3), stopwatch)
    return forward, max(both, 1.001 * forward)
