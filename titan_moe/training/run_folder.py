"""The folder of a run: what it is made of, and records of an earlier attempt, which a run that starts anew keeps."""

import logging
import shlex
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch.distributed as dist

from titan_moe.config import Recipe
from titan_moe.config.parallel import ranks_of_a_node
from titan_moe.config.parse import dump_recipe
from titan_moe.metrics.environment import write_environment
from titan_moe.metrics.whole_file import write_whole

logger = logging.getLogger("titan_moe")

RECORDS = (
    "environment.json",
    "tensorboard",
    "wandb",
    "wandb_id",
    "traces",
    "hangs",
    "metrics.dropped.jsonl",
    "metrics.jsonl",
)
"""The metrics are moved last: after an interrupted move they are still found."""


def open_run_folder(recipe: Recipe, *, is_new: bool) -> None:
    """Write what a run is made of. Records of an attempt that left no checkpoint are kept. Call it on rank 0."""
    folder = Path(recipe.run.folder)
    if is_new and (aside := set_aside(folder)):
        logger.warning("%s has records and no checkpoint: they are now in %s", folder, aside)
    write_environment(folder)  # beside it, recipe.toml means this folder
    checkpoint = replace(recipe.checkpoint, accept_changed_data=False)  # the choice was for this resume
    run = replace(recipe.run, folder=str(folder.absolute()))
    write_whole(folder / "recipe.toml", dump_recipe(replace(recipe, run=run, checkpoint=checkpoint)))


def command_to_go_on(run_folder: Path) -> str:
    """The command that goes on with a run; on several nodes what torchrun is to run."""
    num_ranks = dist.get_world_size()
    is_launched = 1 < num_ranks == ranks_of_a_node(num_ranks)
    recipe = shlex.quote(str(run_folder / "recipe.toml"))
    return f"titan-moe train {recipe}{f' --nproc {num_ranks}' if is_launched else ''}"


def set_aside(run_folder: Path) -> Path | None:
    """Move the records of an earlier attempt into a folder `attempt-N` of the run folder. Call it on rank 0.

    Returns: the new folder, or None if the run folder has no metrics.
    """
    metrics = run_folder / "metrics.jsonl"
    if not metrics.exists() or metrics.stat().st_size == 0:
        return None
    aside = next(path for number in count(1) if not (path := run_folder / f"attempt-{number}").exists())
    aside.mkdir()
    recipe = run_folder / "recipe.toml"
    if recipe.exists():  # a copy: the run writes its own over it, and until then it still names this folder
        shutil.copy2(recipe, aside)
    for name in RECORDS:
        if (run_folder / name).exists():
            (run_folder / name).rename(aside / name)
    return aside
