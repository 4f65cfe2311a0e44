"""`titan-moe tune`: time all backends of a recipe's kernels at its shapes, and write the results to a table.

One GPU measures the work of one rank for any number of ranks: routing is random and balanced, and there is no
communication. Operations that a run compiles are compiled here too.
"""

import logging
import textwrap
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch
import triton

from titan_moe.config import Recipe, RecipeError
from titan_moe.kernels.registry import Tunable, load_all
from titan_moe.kernels.timing import Stopwatch, forward_and_total_ms, replayed_ms
from titan_moe.plan.kernel_choice import backends_that_can_run, choose_for, describe_choices
from titan_moe.plan.kernel_shapes import Shape, shapes_of
from titan_moe.plan.kernel_table import KernelTable, Measured, cached_tables, read_table, table_name, write_table

logger = logging.getLogger("titan_moe")


def run(recipe: Recipe, world_size: int, out: Path | None = None) -> None:
    """Measure on this GPU and merge the results into a table: `out`, or the user's table of this device.

    Raises: RecipeError without a GPU, or if the table is invalid or of another device.
    """
    if recipe.run.device == "cpu" or not torch.cuda.is_available():
        cause = 'run.device = "cpu"' if recipe.run.device == "cpu" else "PyTorch finds no GPU"
        raise RecipeError([f"{cause}, and there is nothing to measure on a CPU; run titan-moe tune on a GPU host"])
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    path = out or cached_tables() / table_name(name)
    table = open_table(path, name)
    for entry in measure(recipe, world_size, device):
        table = table.merged([entry])
        write_table(path, table)  # at once: a later kernel may crash the process
        logger.info("wrote %s to %s", entry.operation, path)
    logger.info('perf.kernels = "auto" on %s, with the tables in %s and in the package:', name, cached_tables())
    for line in describe_choices(choose_for(recipe, world_size, name, torch.cuda.get_device_capability(device))):
        logger.info("  %s", line)


def open_table(path: Path, device: str) -> KernelTable:
    """Read the table to extend, or make an empty one if there is no file yet.

    Raises: RecipeError if the file is not a table, or a table of another device.
    """
    table = read_table(path) if path.exists() else KernelTable(device)
    if table.device != device:
        raise RecipeError([f"{path} is a table of {table.device}, but this is {device}; give another file with --out"])
    return table


def measure(
    recipe: Recipe, world_size: int, device: torch.device, stopwatch: Stopwatch = replayed_ms
) -> Iterator[Measured]:
    """Time each tunable operation of the recipe. One with fewer than two backends, or a failing one, is skipped."""
    tunables = {kernel.tunable.operation: kernel.tunable for kernel in load_all().values() if kernel.tunable}
    is_compiled = recipe.compile.compiles(device.type)
    for operation, shape in shapes_of(recipe, world_size).items():
        if operation not in tunables:
            continue
        tunable = tunables[operation]
        backends = backends_that_can_run(recipe, world_size, operation, list(tunable.candidates))
        if len(backends) < 2:
            logger.info("%s: nothing to choose in this recipe", operation)
            continue
        ms = {}
        for backend in backends:
            try:
                ms[backend] = _time(tunable, backend, shape, device, is_compiled, stopwatch)
            except Exception as error:  # a failing backend must not prevent the measurement of other operations
                reason = textwrap.shorten(f"{type(error).__name__}: {error}", 240, placeholder=" ...")
                logger.warning("%s %s fails, so nothing is written: %s", operation, backend, reason)
            else:
                logger.info("%s %s: %.4g ms forward and backward", operation, backend, ms[backend])
        if len(ms) == len(backends):
            today = date.today().isoformat()
            yield Measured(operation, shape, ms, torch.__version__.partition("+")[0], triton.__version__, today)


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
