"""Measure, for the shapes of a recipe, every implementation that its kernels could be chosen from, and write it down.

One GPU measures what one rank does, whatever the number of ranks: routing is random and even, and no message travels.
What is compiled in a run is compiled here.
"""

import logging
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

from titan_moe.compile import regional
from titan_moe.config import Recipe, RecipeError
from titan_moe.kernels.registry import Tunable, load_all
from titan_moe.kernels.timing import Stopwatch, forward_and_total_ms, median_ms
from titan_moe.plan.kernel_choice import choose_for, in_words, makers_that_may_run
from titan_moe.plan.kernel_shapes import Shape, shapes_of
from titan_moe.plan.kernel_table import KernelTable, Measured, cached_tables, read_table, table_name, write_table

logger = logging.getLogger("titan_moe")


def run(recipe: Recipe, world_size: int, out: Path | None = None) -> None:
    """Measure on this GPU and merge the result into a table: `out`, or the user's own of this device.

    Raises: RecipeError if there is no GPU, or if the table there is none, or another device's.
    """
    if recipe.run.device == "cpu" or not torch.cuda.is_available():
        cause = 'run.device = "cpu"' if recipe.run.device == "cpu" else "PyTorch sees no GPU"
        raise RecipeError([f"{cause}, and there is nothing to measure on a CPU; run titan-moe tune where a GPU is"])
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    path = out or cached_tables() / table_name(name)
    table = table_at(path, name)
    measured = list(measure(recipe, world_size, device))
    if measured:
        write_table(path, table.merged(measured))
        logger.info("%s has it", path)
    logger.info('perf.kernels = "auto" on %s, by the tables in %s and in the package:', name, cached_tables())
    for line in in_words(choose_for(recipe, world_size, name)):
        logger.info("  %s", line)


def table_at(path: Path, device: str) -> KernelTable:
    """The table to go on with; an empty one if there is no file yet.

    Raises: RecipeError if the file is no table, or another device's.
    """
    table = read_table(path) if path.exists() else KernelTable(device)
    if table.device != device:
        raise RecipeError([f"{path} is a table of {table.device}, and this is {device}; name another file with --out"])
    return table


def measure(
    recipe: Recipe, world_size: int, device: torch.device, stopwatch: Stopwatch = median_ms
) -> Iterator[Measured]:
    """Time each tunable operation of the recipe; one with fewer than two candidates, or a broken one, is left out."""
    tunables = {kernel.tunable.operation: kernel.tunable for kernel in load_all().values() if kernel.tunable}
    for operation, shape in shapes_of(recipe).items():
        if operation not in tunables:
            continue
        tunable = tunables[operation]
        makers = makers_that_may_run(recipe, world_size, operation, list(tunable.candidates))
        if len(makers) < 2:
            logger.info("%s: nothing to choose in this recipe", operation)
            continue
        is_compiled = tunable.is_compiled and regional.is_on(recipe.compile, device)
        ms = _time_all(tunable, makers, shape, device, is_compiled, stopwatch)
        if len(ms) == len(makers):
            today = date.today().isoformat()
            yield Measured(operation, shape, ms, torch.__version__.partition("+")[0], triton.__version__, today)


def _time_all(
    tunable: Tunable, makers: list[str], shape: Shape, device: torch.device, is_compiled: bool, stopwatch: Stopwatch
) -> dict[str, float]:
    """Milliseconds of forward and backward by candidate, on the same arguments; without those that fail here."""
    torch.manual_seed(0)
    sample = tunable.draw(shape, device)
    ms = {}
    for maker in makers:
        torch._dynamo.reset()  # a graph for this shape alone
        op: Callable[..., Any] = tunable.candidates[maker]
        try:
            timed = torch.compile(op, fullgraph=True) if is_compiled else op
            ms[maker] = round(forward_and_total_ms(timed, sample, stopwatch)[1], 4)
        except Exception as error:
            logger.warning("%s %s cannot run here, so nothing is written: %s", tunable.operation, maker, error)
        else:
            logger.info("%s %s: %.4g ms forward and backward", tunable.operation, maker, ms[maker])
    return ms
