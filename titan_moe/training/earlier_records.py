"""Records of an earlier attempt in a run folder. A run that starts anew keeps them."""

import shutil
from itertools import count
from pathlib import Path

RECORDS = ("environment.json", "tensorboard", "traces", "hangs", "metrics.dropped.jsonl", "metrics.jsonl")
"""The metrics are moved last: after an interrupted move they are still found."""


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
