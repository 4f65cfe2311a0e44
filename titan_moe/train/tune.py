"""`titan-moe tune`: time all backends of a recipe's kernels, and formats, at its shapes; write the results to a table.

One GPU measures the work of one rank for any number of ranks: routing is random and balanced, and there is no
communication. Operations that a run compiles are compiled here too.
"""

import logging
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

from titan_moe.config import Recipe, RecipeError
from titan_moe.kernels.registry import load_all
from titan_moe.kernels.timing import Stopwatch, replayed_ms
from titan_moe.plan.format_choice import choose_formats, describe_formats
from titan_moe.plan.kernel_choice import backends_that_can_run, choose_for, describe_choices
from titan_moe.plan.kernel_shapes import shapes_of
from titan_moe.plan.kernel_table import KernelTable, Measured, cached_tables, read_table, table_name, write_table
from titan_moe.train.tune_formats import measure_formats
from titan_moe.train.tune_times import measured_today, time_backends

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
    table, capability = open_table(path, name), torch.cuda.get_device_capability(device)
    formats = measure_formats(recipe, world_size, device, capability)
    for entry in chain(measure(recipe, world_size, device), formats):
        table = table.merged([entry])
        write_table(path, table)  # at once: a later kernel may crash the process
        logger.info("wrote %s to %s", entry.operation, path)
    logger.info('perf.kernels = "auto" on %s, with the tables in %s and in the package:', name, cached_tables())
    for line in describe_choices(choose_for(recipe, world_size, name, capability)):
        logger.info("  %s", line)
    for line in describe_formats(recipe, choose_formats(recipe, name, capability)):
        logger.info("formats: %s", line)


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
        ms = time_backends(tunable, backends, shape, device, stopwatch, is_compiled, "nothing is written")
        if len(ms) == len(backends):
            yield measured_today(operation, shape, ms)
