"""Find the checkpoint that a command names, and the recipe that uses its model. No torch is needed."""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from titan_moe.checkpoint.folders import METADATA_FILE, SOURCE_FOLDER, CheckpointFolders
from titan_moe.checkpoint.hf_folder import CONFIG_FILE
from titan_moe.checkpoint.hf_recipe import parts_not_built, read_model, without_parts
from titan_moe.checkpoint.manifest import read_manifest
from titan_moe.config import Recipe, RecipeError
from titan_moe.config.data_files import kind_of_name
from titan_moe.config.parse import recipe_of
from titan_moe.config.renamed import values_before
from titan_moe.config.resume import flatten

HUGGING_FACE = "hf:"
"""Begins a `checkpoint.load_from` that is a folder of Hugging Face."""
KEPT = (
    "model.",
    "data.",
    "precision.",
    "validation.",
    "run.seed",
    "train.seq_len_tokens",
    "train.micro_batch_sequences",
    "perf.attention",
    "perf.loss_chunk_tokens",
)
"""What of a run's recipe holds for its model wherever it is used. Layout, speed and optimizer are others; but what
trains is in no codes."""
KEPT_OF_DATA = ("data.tokenizer", "data.split_special_tokens", "data.document_attention")
"""What of a run's `[data]` other data is read with, where `overrides` say nothing else."""
KEPT_OF_CHATS = ("data.format", "data.chat.")
"""The same where other data has rows."""
OF_OWN_DATA = ("validation.path", "validation.sets", "validation.source", "validation.split")
HF_SEQUENCE_TOKENS = 2048
"""Tokens of a sequence in an evaluation of a Hugging Face checkpoint, which does not say it."""


class Found(NamedTuple):
    """A checkpoint to use."""

    folder: Path
    is_hf: bool

    @property
    def side_files(self) -> Path | None:
        """The folder with tokenizer and generation files of Hugging Face that belong to it."""
        for folder in (self.folder, self.folder.parent.parent / SOURCE_FOLDER):
            if (folder / CONFIG_FILE).is_file():
                return folder
        return None


def find_checkpoint(path: str | Path, *, takes_hf: bool = False) -> Found:
    """The checkpoint of a path: a folder `step-N` or an imported one, the newest of a run's folder, or of Hugging Face.

    Raises: RecipeError that says what is there instead.
    """
    folder = Path(path).expanduser()
    if (folder / METADATA_FILE).is_file():
        return Found(folder, is_hf=False)
    for root in (folder / "checkpoints", folder):
        if steps := CheckpointFolders(root).complete_steps():
            return Found(CheckpointFolders(root).path(steps[-1]), is_hf=False)
    if (folder / CONFIG_FILE).is_file():
        if takes_hf:
            return Found(folder, is_hf=True)
        raise RecipeError([f"{folder} is a Hugging Face checkpoint; titan-moe import makes one of ours from it"])
    what = "has no complete checkpoint" if folder.is_dir() else "is no folder"
    if beside := [] if folder.is_dir() else CheckpointFolders(folder.parent).complete_steps():
        what += f" (beside it: {', '.join(f'step-{step}' for step in beside)})"
    expected = "the folder of a run, of one of its checkpoints (`step-N`)" + ", or of Hugging Face" * takes_hf
    raise RecipeError([f"{folder} {what}; name {expected}"])


def saved_fields(folder: Path) -> dict[str, Any]:
    """The recipe that wrote a checkpoint, by dotted key.

    Raises: RecipeError if it has none.
    """
    try:
        manifest = read_manifest(folder)
    except (OSError, ValueError) as error:
        raise RecipeError([f"{folder}: {error}"]) from error
    if manifest is None:
        raise RecipeError([f"{folder} has no manifest, so its [model] is unknown: it is of an early version"])
    return manifest.recipe | values_before(manifest.recipe)


def end_tokens(found: Found) -> tuple[int, ...]:
    """What ends a text, as generation_config.json or config.json of its side files says."""
    for name in ("generation_config.json", CONFIG_FILE):
        file = found.side_files / name if found.side_files else None
        if file is None or not file.is_file():
            continue
        try:
            ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise RecipeError([f"{file} cannot be read: {error}"]) from error
        if ids is not None:
            return tuple(id_ for id_ in (ids if isinstance(ids, list) else [ids]) if isinstance(id_, int))
    return ()


def recipe_to_use(found: Found, overrides: Sequence[str], *, other_data: bool = False) -> Recipe:
    """A recipe whose model is that of a checkpoint, on one rank unless `overrides` say otherwise.

    Weights have the dtype of `precision.compute`, in which they are used. With `other_data` the tokenizer of its
    data remains, and how conversations are read.

    Raises: RecipeError or HuggingFaceError with all problems.
    """
    fields: dict[str, Any]
    if found.is_hf:
        family, model, settings = read_model(found.folder)
        model = without_parts(family, model, family.built)  # only training reads them
        fields = {name: value for name, value in flatten(Recipe(model=model)).items() if name.startswith("model.")}
        fields |= {"train.seq_len_tokens": HF_SEQUENCE_TOKENS, "train.micro_batch_sequences": 1}
        fields |= {"checkpoint.load_without": (*parts_not_built(family, settings.values), *family.built)}
    else:
        saved = saved_fields(found.folder)
        of_codes = ("optim.trainable",) if saved.get("model.adapter.base", "compute") != "compute" else ()
        fields = {name: value for name, value in saved.items() if name.startswith(KEPT + of_codes)}
    if other_data:
        others = {name: value for name, value in fields.items() if not name.startswith(("data.", *OF_OWN_DATA))}
        kept = KEPT_OF_DATA + KEPT_OF_CHATS * (not _says_no_chats(overrides))
        fields = others | {name: value for name, value in fields.items() if name.startswith(kept)}
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    fields |= _tokenizer(found, fields) | {"checkpoint.load_from": f"{HUGGING_FACE * found.is_hf}{found.folder}"}
    fields["validation.every_steps"] = 0
    fields |= {"run.folder": str(_folder_for_data(found)), "metrics.tensorboard": False, "metrics.wandb": False}
    recipe = recipe_of(fields, str(found.folder), overrides)
    if recipe.data.source == "synthetic" and not any(word.startswith("--data.tokenizer") for word in overrides):
        named = "" if recipe.data.tokenizer == "bytes" else recipe.data.tokenizer  # of ids that stand for no bytes
        recipe = replace(recipe, data=replace(recipe.data, tokenizer=named))
    if recipe.precision.compute != "bf16" or any(word.startswith("--precision.master") for word in overrides):
        return recipe
    narrow = replace(recipe.precision, master="bf16", moments="master", gradients="master")  # no optimizer reads them
    if recipe.model.adapter.has_codes:  # experts then bypass FSDP
        narrow = replace(narrow, reduce="bf16")
    return replace(recipe, precision=narrow, optim=replace(recipe.optim, kind="fused_adamw"))


def _says_no_chats(overrides: Sequence[str]) -> bool:
    """Whether overrides name files that have no rows, or say what rows are."""
    values = {}
    for word, following in zip(overrides, [*overrides[1:], ""], strict=True):
        key, equals, value = word.partition("=")
        values[key] = value if equals else following
    kinds = kind_of_name(values.get("--data.path", "")), values.get("--data.source")
    return "--data.format" in values or not {"text", "tokens", "synthetic"}.isdisjoint(kinds)


def _tokenizer(found: Found, fields: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer that came with the weights, where the recipe names none that is here."""
    name, beside = fields.get("data.tokenizer"), found.side_files
    if beside is None or not any(beside.glob("tokenizer*")):
        return {}
    is_elsewhere = name not in (None, "", "bytes") and not Path(name).expanduser().is_dir()
    return {"data.tokenizer": str(beside)} if beside == found.folder or is_elsewhere else {}


def _folder_for_data(found: Found) -> Path:
    """The folder of this use, beside which tokenised data is cached: that of the run, else one of this user."""
    run = found.folder.parent.parent
    if (run / "recipe.toml").is_file():
        return run
    return Path(tempfile.gettempdir()) / f"titan_moe-{os.getuid() if hasattr(os, 'getuid') else 'user'}" / "use"
