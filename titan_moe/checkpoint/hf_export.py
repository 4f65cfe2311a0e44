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
from torch.distributed.checkpoint.api import CheckpointException

from titan_moe.checkpoint.folders import SOURCE_FOLDER
from titan_moe.checkpoint.hf_describe import with_parts_left_out
from titan_moe.checkpoint.hf_folder import CONFIG_FILE, INDEX_FILE, HuggingFaceError, read_config
from titan_moe.checkpoint.hf_names.family import Family, Values
from titan_moe.checkpoint.hf_names.names import Piece
from titan_moe.checkpoint.manifest import FileHash
from titan_moe.checkpoint.storage import reasons_of
from titan_moe.plan.cost.hugging_face import MAX_FILE_BYTES as MAX_FILE_BYTES

HUGGING_FACE_MANIFEST = "titan_moe.json"
OF_TOKENIZERS: tuple[str, ...] = (
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "tokenization_*.py",
)
COPIED = ("generation_config.json", "configuration_*.py", "modeling_*.py", *OF_TOKENIZERS)
"""Files of a checkpoint that are no weights, and go along. They are copied, not run."""
Read = Callable[[dict[str, Tensor]], object]
"""Fill tensors, by their names on disk, whose shapes are `Piece.view`."""


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype, family: Family, skipped: Iterable[str]) -> Values:
    """What config.json says of an export: the dtype, no quantisation, and no parts that were left out."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    result = {**config, key: str(dtype).removeprefix("torch.")}
    result.pop("quantization_config", None)
    return with_parts_left_out(result, family, skipped)


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
    copied: Iterable[Path],
) -> None:
    """Write the index and config.json, and copy other files."""
    sizes = (
        torch.Size(piece.shape).numel() * dtypes[piece.ours].itemsize for group in files.values() for piece in group
    )
    weight_map = {piece.name: file for file, group in files.items() for piece in group}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    for name in files:
        shutil.copymode(folder / INDEX_FILE, folder / name)  # safetensors gives them to their owner alone
    for file in copied:
        shutil.copyfile(file, folder / file.name)


def side_files(folder: Path, patterns: Iterable[str] = (CONFIG_FILE, *COPIED)) -> list[Path]:
    """The files of a checkpoint that are no weights, and that a model made from it keeps."""
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def to_copy(source: Path | None, tokenizer: str | Path | None) -> list[Path]:
    """What an export has besides weights and config.json: of its source, else of the folder of a tokenizer."""
    if source is not None:
        return side_files(source, COPIED)
    return side_files(Path(tokenizer).expanduser(), OF_TOKENIZERS) if tokenizer else []


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
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))["left_out"])
    except (ValueError, KeyError, TypeError) as error:
        raise HuggingFaceError(file.parent, [f"{file.name} is damaged; restore it"]) from error


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
def converting(folder: Path) -> Iterator[None]:
    """Say in words what fails while a folder is written from files: a full disk, a file that cannot be read.

    Raises: HuggingFaceError with the folder.
    """
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
        raise HuggingFaceError(folder, [f"it cannot be written: {reason}"]) from error
    except (CheckpointException, SafetensorError) as error:
        reason = reasons_of(error) if isinstance(error, CheckpointException) else str(error)
        raise HuggingFaceError(folder, [f"it cannot be written: {reason}"]) from error


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
