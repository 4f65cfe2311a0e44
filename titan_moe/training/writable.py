"""Find a folder of a run that cannot be written, before the model is built and the first steps are taken."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from titan_moe.checkpoint.rank_zero import run_on_rank_zero
from titan_moe.config import Recipe, RecipeError


@contextmanager
def writable_folders(recipe: Recipe) -> Iterator[None]:
    """Make the folders that all ranks write into, of checkpoints and traces, and write a file in them. Collective.

    Folders that were made here and stay empty are removed on exit. Permissions do not tell: the user root has all of
    them, also on storage that is mounted read-only.

    Raises: RecipeError on all ranks, with the folder, the rank and the reason.
    """
    run_folder = Path(recipe.run.folder)
    folders = [run_folder / "checkpoints", *([run_folder / "traces"] if recipe.profile.start_step else [])]
    with ExitStack() as made:
        run_on_rank_zero(lambda: [made.enter_context(_made(folder)) for folder in folders] and None)
        problems: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(problems, next(filter(None, map(_problem, folders)), ""))
        if found := next(filter(None, problems), ""):
            raise RecipeError([found])
        yield


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError([_words(folder, error)]) from error
    try:
        yield
    finally:
        if not existed:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _problem(folder: Path) -> str:
    """Why this rank cannot write into a folder; empty if it can."""
    file = folder / f".rank-{dist.get_rank()}"
    try:
        file.write_bytes(b"0")
        file.unlink()
    except OSError as error:
        return _words(folder, error)
    return ""


def _words(folder: Path, error: OSError) -> str:
    return f"run.folder: {folder} cannot be written by rank {dist.get_rank()}: {error.strerror}; set a writable folder"
