"""Weights & Biases output of the records. Its package is imported only here, and only if a recipe asks for it.

A run that is resumed goes on in the same run there, whose id is in `RUN/wandb_id`. A record has its step as a number of
its own, by which charts are drawn: steps that a resumed run repeats are logged again, where `wandb.log(step=...)` would
drop them. No failure of the package ends a run.
"""

import logging
import secrets
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from titan_moe.config import Recipe, RecipeError
from titan_moe.config.resume import flatten
from titan_moe.metrics.sections import LOADS, charted
from titan_moe.metrics.whole_file import write_whole

logger = logging.getLogger("titan_moe")

ID_FILE = "wandb_id"
PACKAGE = "wandb"
LOGIN_S, START_S, END_S = 60, 90, 120.0
"""Seconds to wait for the key of a user at a terminal, for the server at the start, and for uploads at the end."""
WAY_OUT = "install it (`pip install wandb`), or set metrics.wandb = false"


def require_wandb() -> None:
    """Import the package. Call it on rank 0, before the work of a run.

    Raises: RecipeError if it cannot be imported.
    """
    try:
        import_module(PACKAGE)
    except Exception as error:  # an incompatible package beside it may raise anything
        problem = f"metrics.wandb = true needs the package {PACKAGE}, which cannot be imported"
        raise RecipeError([f"{problem} ({type(error).__name__}: {error}); {WAY_OUT}"]) from error


class WeightsAndBiases:
    """Log every number of a record. After a failure nothing more is logged, with one warning."""

    def __init__(self, recipe: Recipe, run_folder: Path) -> None:
        self.folder = run_folder
        self.run: Any = None
        self._guarded("its start", lambda: self._start(recipe))

    def write(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a record with its step."""
        if self.run is not None:
            self._guarded("logging", lambda: self.run.log({"step": record["step"], **charted(record)}))

    def write_loads(self, image_HW: np.ndarray, step: int) -> None:
        """Log the image of the loads of experts: uint8 [H, W], gray."""
        if self.run is not None:
            image = import_module(PACKAGE).Image
            self._guarded("logging an image", lambda: self.run.log({"step": step, LOADS: image(image_HW)}))

    def close(self) -> None:
        """Upload what is left, in limited time: without a network the package tries for long."""
        if self.run is None:
            return
        end = Thread(target=self._guarded, args=("its end", self.run.finish), name="end of wandb", daemon=True)
        end.start()
        end.join(END_S)
        if end.is_alive():
            logger.warning(
                "Weights & Biases has not taken all records within %g seconds; they are in %s: `wandb sync` sends them",
                END_S,
                self.folder / PACKAGE,
            )
        self.run = None

    def _start(self, recipe: Recipe) -> None:
        wandb = import_module(PACKAGE)
        self.run = wandb.init(
            project=recipe.metrics.wandb_project,
            name=recipe.metrics.wandb_name or self.folder.resolve().name,
            id=_id_of(self.folder),
            resume="allow",
            dir=str(self.folder),
            config=flatten(recipe),
            settings=wandb.Settings(login_timeout=LOGIN_S, init_timeout=START_S),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def _guarded(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            self.run = None
            logger.warning(
                "Weights & Biases failed at %s (%s: %s); the run goes on without it, its records are in metrics.jsonl",
                what,
                type(error).__name__,
                error,
            )


def _id_of(run_folder: Path) -> str:
    """The run's id there: that of the folder, or a new one, which the folder keeps."""
    file = run_folder / ID_FILE
    if not file.exists():
        write_whole(file, secrets.token_hex(4) + "\n")
    return file.read_text(encoding="utf-8").strip()
