"""Time the implementations of one operation for `titan-moe tune`, with log lines for what fails."""

import logging
import textwrap
from collections.abc import Iterable, Mapping
from datetime import date

import torch
import triton

from titan_moe.kernels.registry import Tunable
from titan_moe.kernels.timing import Stopwatch, forward_and_total_ms
from titan_moe.plan.kernel_shapes import Shape
from titan_moe.plan.kernel_table import Measured

logger = logging.getLogger("titan_moe")


def time_backends(
    tunable: Tunable,
    backends: Iterable[str],
    shape: Shape,
    device: torch.device,
    stopwatch: Stopwatch,
    is_compiled: bool,
    consequence: str,
) -> dict[str, float]:
    """Milliseconds of forward and backward of each backend that runs; the log names the others, and a consequence."""
    ms = {}
    for backend in backends:
        try:
            ms[backend] = _time(tunable, backend, shape, device, is_compiled, stopwatch)
        except Exception as error:  # a failing backend must not prevent the measurement of other operations
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", 240, placeholder=" ...")
            logger.warning("%s %s fails, so %s: %s", tunable.operation, backend, consequence, reason)
        else:
            logger.info("%s %s: %.4g ms forward and backward", tunable.operation, backend, ms[backend])
    return ms


def measured_today(operation: str, shape: Shape, ms: Mapping[str, float]) -> Measured:
    """An entry of a table, with the versions and the date of now."""
    return Measured(
        operation, shape, ms, torch.__version__.partition("+")[0], triton.__version__, date.today().isoformat()
    )


def _time(
    tunable: Tunable, backend: str, shape: Shape, device: torch.device, is_compiled: bool, stopwatch: Stopwatch
) -> float:
    """Milliseconds of a backend's forward and backward. All backends get the same arguments."""
    torch.manual_seed(0)
    sample = tunable.draw(shape, device)
    torch._dynamo.reset()  # a graph for this shape alone
    op = tunable.candidates[backend]
    op = tunable.compiled(op, shape) if is_compiled else op
    return round(forward_and_total_ms(op, sample, stopwatch)[1], 4)
