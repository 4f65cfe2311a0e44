"""Write the files of a Hugging Face checkpoint: weights, index, config.json, copies, manifest. Nothing is left behind.

All is written into a temporary folder beside the place, which gets its name at the end.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_moe.checkpoint.folders import SOURCE_FOLDER
from titan_moe.checkpoint.hf_folder import CONFIG_FILE, INDEX_FILE, HuggingFaceError, read_config
from titan_moe.checkpoint.hf_names.families import family_for, family_of
from titan_moe.checkpoint.hf_names.family import Family, Values, same_model
from titan_moe.checkpoint.hf_names.names import Piece
from titan_moe.checkpoint.manifest import FileHash
from titan_moe.config.model import ModelConfig
from titan_moe.plan.cost.hugging_face import MAX_FILE_BYTES as MAX_FILE_BYTES

HUGGING_FACE_MANIFEST = "titan_moe.json"
COPIED: tuple[str, ...] = (
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
)
COPIED += (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "configuration_*.py",
    "modeling_*.py",
    "tokenization_*.py",
)
"""Files of a checkpoint that are no weights, and go along. They are copied, not run."""
Read = Callable[[dict[str, Tensor]], object]
"""Fill tensors, by their names on disk, whose shapes are `Piece.view`."""


def described(model: ModelConfig, source: Path | None) -> tuple[Family, Values]:
    """The family and the config.json of a model: that of the source, as far as the model is still what it says.

    Raises: ValueError if no family has words for the model.
    """
    if source is None or not (source / CONFIG_FILE).exists():
        family = family_for(model)
        return family, with_parts_left_out(family.write(model), family, family.not_built)
    config = read_config(source)
    family = family_of(config)
    was, settings = family.read(config)
    if not same_model(model, was):
        return family, config
    return family, {key: value for key, value in config.items() if key not in settings.used} | family.write(model)


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype, family: Family, skipped: Iterable[str]) -> Values:
    """What config.json says of an export: the dtype, no quantisation, and no parts that were left out."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    result = {**config, key: str(dtype).removeprefix("torch.")}
    result.pop("quantization_config", None)
    return with_parts_left_out(result, family, skipped)


def with_parts_left_out(config: Mapping[str, Any], family: Family, parts: Iterable[str]) -> Values:
    """A config.json that says that a model lacks parts."""
    return {**config, **{key: value for part in parts for key, value in family.without.get(part, {}).items()}}


def files_of(pieces: Iterable[Piece], dtypes: Mapping[str, torch.dtype], max_bytes: int) -> dict[str, list[Piece]]:
    """Divide tensors over files, in their order."""
    groups: list[list[Piece]] = [[]]
    filled = 0
    for piece in pieces:
        num_bytes = torch.Size(piece.shape).numel() * dtypes[piece.ours].itemsize
        if filled and filled + num_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += num_bytes
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def write_weights(
    folder: Path, files: Mapping[str, list[Piece]], dtypes: Mapping[str, torch.dtype], read: Read
) -> None:
    """Write files of weights, one after the other."""
    from safetensors.torch import save_file

    for file, group in files.items():
        tensors = {piece.name: torch.empty(piece.shape, dtype=dtypes[piece.ours]) for piece in group}
        read({piece.name: tensors[piece.name].view(piece.view) for piece in group})
        save_file(tensors, folder / file, metadata={"format": "pt"})


def write_description(
    folder: Path,
    files: Mapping[str, list[Piece]],
    dtypes: Mapping[str, torch.dtype],
    config: Mapping[str, Any],
    source: Path | None,
) -> None:
    """Write the index and config.json, and copy what the source has besides."""
    sizes = (
        torch.Size(piece.shape).numel() * dtypes[piece.ours].itemsize for group in files.values() for piece in group
    )
    weight_map = {piece.name: file for file, group in files.items() for piece in group}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    for name in files:
        shutil.copymode(folder / INDEX_FILE, folder / name)  # safetensors gives them to their owner alone
    for file in side_files(source) if source else ():
        if file.name != CONFIG_FILE:
            shutil.copyfile(file, folder / file.name)


def side_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that are no weights, and that a model made from it keeps."""
    patterns = (CONFIG_FILE, *COPIED)
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def write_manifest(folder: Path, hashes: Mapping[str, str], skipped: Mapping[str, list[str]]) -> None:
    """Write the SHA-256 of every file, and what was left out of the source."""
    contents = {"format": 1, "files": dict(sorted(hashes.items())), "left_out": dict(skipped)}
    (folder / HUGGING_FACE_MANIFEST).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")


def hashes_of(folder: Path, files: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of files, which are read."""
    hashes = {}
    for name in files:
        with (folder / name).open("rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def left_out(source: Path | None) -> dict[str, list[str]]:
    """What an earlier import has left out, as the manifest beside its config.json says."""
    file = source / HUGGING_FACE_MANIFEST if source else None
    if file is None or not file.exists():
        return {}
    return dict(json.loads(file.read_text(encoding="utf-8"))["left_out"])


def keep_source(source: Path, folder: Path, skipped: Mapping[str, list[str]]) -> dict[str, FileHash]:
    """Copy what a checkpoint has besides weights, with a list of what was left out. Returns: what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in side_files(source):
        shutil.copyfile(file, folder / file.name)
    write_manifest(folder, {}, skipped)
    names = [*(file.name for file in side_files(source)), HUGGING_FACE_MANIFEST]
    return {name: FileHash((folder / name).stat().st_size, hash_) for name, hash_ in hashes_of(folder, names).items()}


def source_of(checkpoint: Path) -> Path | None:
    """The folder with the config.json and the tokenizer that a checkpoint began with: itself, or that of its run."""
    for folder in (checkpoint, checkpoint.parent.parent / SOURCE_FOLDER):
        if (folder / CONFIG_FILE).exists():
            return folder
    return None


def dtype_of(source: Path | None) -> torch.dtype:
    """The dtype that a config.json names, else bf16."""
    config = {} if source is None else read_config(source)
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def refuse_existing(folder: Path) -> None:
    """Raises: HuggingFaceError for a folder that has something in it, or a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HuggingFaceError(folder, ["it exists and is not empty; name a new folder, or remove it"])


def temporary(folder: Path) -> Path:
    """Where a folder is written before it gets its name."""
    return folder.with_name(f".{folder.name}.unfinished")


@contextmanager
def renamed_at_the_end(folder: Path) -> Iterator[Path]:
    """A new folder beside the place, which gets its name if nothing fails, and else is removed."""
    unfinished = temporary(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
