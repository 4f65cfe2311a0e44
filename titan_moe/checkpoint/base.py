"""Know the weights that a run began with, where its checkpoints lack those that are frozen."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_moe.checkpoint.find import HUGGING_FACE
from titan_moe.config.train import RunConfig
from titan_moe.config.upcycle import NO_UPCYCLING, UpcycleConfig

ENDINGS = (".safetensors", ".distcp")
SAMPLE_BYTES = 1 << 20
NUM_SAMPLES = 3
"""Of a file: its start, its middle and its end."""


def path_of(load_from: str) -> Path:
    """The folder of a `checkpoint.load_from`."""
    return Path(load_from.removeprefix(HUGGING_FACE)).expanduser()


def lacks(recipe: Mapping[str, Any]) -> str:
    """Say that a checkpoint with this recipe lacks the weights of its base; empty if it does not."""
    if recipe.get("checkpoint.saves_frozen", True):
        return ""
    origin = recipe.get("checkpoint.load_from", "")
    return (
        "it has no frozen weights (checkpoint.saves_frozen = false): they are those of its base, "
        f"checkpoint.load_from = {origin!r}"
    )


def how_read(recipe: Mapping[str, Any]) -> tuple[tuple[str, ...], UpcycleConfig, int]:
    """How a run has read its base from Hugging Face, as `load_hf` takes it: what it left out, how it made experts of
    dense MLPs, and the seed."""
    section = "checkpoint.upcycle."
    upcycle = {name: recipe[f"{section}{name}"] for name in vars(NO_UPCYCLING) if f"{section}{name}" in recipe}
    skipped = tuple(recipe.get("checkpoint.load_without", ()))
    return skipped, UpcycleConfig(**upcycle), recipe.get("run.seed", RunConfig.seed)


def fingerprint(folder: Path) -> str:
    """Describe the content of the files of weights in a folder, wherever it lies: their number, their size, and a hash
    of samples. It reads some megabytes of each."""
    files = sorted(file for file in folder.iterdir() if file.name.endswith(ENDINGS))
    sha256, num_bytes = hashlib.sha256(), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            num_bytes += size
            sha256.update(size.to_bytes(8, "little"))
            for number in range(NUM_SAMPLES):
                file.seek(max(size - SAMPLE_BYTES, 0) * number // (NUM_SAMPLES - 1))
                sha256.update(file.read(SAMPLE_BYTES))
    return f"{len(files)} files, {num_bytes:,} bytes, sha256 of samples {sha256.hexdigest()[:32]}"
