"""A Hugging Face checkpoint on disk: config.json, the index, and what each safetensors file says that it holds.

Only headers are read here. They are JSON, and nothing of a checkpoint is executed.
"""

import json
import struct
from collections.abc import Collection, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from titan_moe.checkpoint.hf_names.family import Family
from titan_moe.checkpoint.hf_names.names import EMBEDDING, HEAD, MXFP4_VALUES, Piece, copies
from titan_moe.config import RecipeError
from titan_moe.config.model import ModelConfig
from titan_moe.config.regular_file import open_regular

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Dtypes of weights -> bytes of a value."""
FP8, MXFP4 = "F8_E4M3", "U8"
SCALE = "_scale_inv"
"""Ends the name of the scales of a weight in fp8, one for each block."""
MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file, as the format limits it."""
MAX_NAMED = 5
COMPARED_BYTES = 1 << 24
"""At a time."""


class HuggingFaceError(RecipeError, ValueError):
    """A Hugging Face checkpoint that is damaged, does not fit, or cannot be written. `problems` has one message per
    problem, with the folder."""

    def __init__(self, folder: Path, problems: Iterable[str]) -> None:
        self.folder, self.of_folder = folder, list(problems)
        super().__init__([f"{folder}: {problem}" for problem in self.of_folder])

    def __str__(self) -> str:
        return f"{self.folder}: {'; '.join(self.of_folder)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self.of_folder)


class Entry(NamedTuple):
    """A tensor on disk."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0  # of its bytes in the file


class HuggingFaceFolder(NamedTuple):
    """What a checkpoint says that it holds."""

    path: Path
    config: dict[str, Any]
    entries: dict[str, Entry]

    @property
    def files(self) -> list[str]:
        """The safetensors files."""
        return sorted({entry.file for entry in self.entries.values()})

    def stored(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The tensors of a model as they are read here: no copies of others, and some may be in MXFP4."""
        read = (piece for piece in pieces if not piece.is_copy)
        return [blocks if (blocks := piece.in_mxfp4) and blocks.name in self.entries else piece for piece in read]

    @property
    def block_size(self) -> int:
        """Rows and columns of the blocks that share a scale, of weights in fp8."""
        quantised = self.config.get("quantization_config")
        sizes = quantised.get("weight_block_size") if isinstance(quantised, dict) else None
        return sizes[0] if isinstance(sizes, list) and sizes and type(sizes[0]) is int and sizes[0] > 0 else 128


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint.

    Raises: HuggingFaceError if it is missing or no JSON object.
    """
    try:
        with open_regular(path / CONFIG_FILE) as file:
            config = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise HuggingFaceError(path, [f"{CONFIG_FILE} cannot be read: {_reason(error)}"]) from error
    if not isinstance(config, dict):
        raise HuggingFaceError(path, [f"{CONFIG_FILE} is no JSON object"])
    return config


def read_folder(path: Path) -> HuggingFaceFolder:
    """Read config.json, the index and the headers of all files.

    Raises: HuggingFaceError that names every file that is missing, truncated, or not what the index says.
    """
    config, problems = read_config(path), []
    index = _read_index(path)
    entries: dict[str, Entry] = {}
    for file in sorted(set(index.values())) if index else [SINGLE_FILE]:
        try:
            header = _read_header(path / file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problems.append(f"{file} cannot be read: {_reason(error)}")
            continue
        listed = {name for name, owner in index.items() if owner == file}
        if index and (missing := listed - header.keys()):
            problems.append(f"{file} lacks {named(missing)}, which {INDEX_FILE} lists")
        if index and (unlisted := header.keys() - listed):
            problems.append(f"{file} has {named(unlisted)}, which {INDEX_FILE} does not list for it")
        entries |= {name: Entry(file, *entry) for name, entry in header.items()}
    known = set(index.values()) or {SINGLE_FILE}
    for file in sorted(file.name for file in path.glob("model*.safetensors") if file.name not in known):
        problems.append(f"{file} is not in {INDEX_FILE}; restore the index, or remove the file")
    if problems:
        raise HuggingFaceError(path, problems)
    return HuggingFaceFolder(path, config, entries)


def names_on_disk(path: Path) -> set[str]:
    """The names of all tensors of a checkpoint; none where its weights are not here, or cannot be read.

    Raises: HuggingFaceError for a damaged index.
    """
    if index := _read_index(path):
        return set(index)
    try:
        return set(_read_header(path / SINGLE_FILE))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor; empty for a checkpoint of one file without an index."""
    if not (path / INDEX_FILE).exists():
        return {}
    try:
        with open_regular(path / INDEX_FILE) as file:
            index = json.load(file)["weight_map"]
        outside = [name for name in index.values() if Path(name).name != name or not name.endswith(".safetensors")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HuggingFaceError(path, [f"{INDEX_FILE} cannot be read: {_reason(error)}"]) from error
    if outside or not index:
        found = f"names {outside[0]}, which is no safetensors file in the folder" if outside else "lists no tensor"
        raise HuggingFaceError(path, [f"{INDEX_FILE} {found}"])
    return dict(index)


def _read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Dtype, shape and place of each tensor of a safetensors file. Its length must be what the header says."""
    with open_regular(path) as file:
        begin = file.read(8)
        length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else 0
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise ValueError("it is truncated, or no safetensors file")
        text = file.read(length)
        if len(text) < length:
            raise ValueError("it is truncated in its header")
        header = json.loads(text)
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if (size := file.seek(0, 2)) != end:
            raise ValueError(f"it is truncated or changed: it has {size:,} bytes instead of {end:,}")
    return {
        name: (entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def refuse_another_head(folder: HuggingFaceFolder, model: ModelConfig, skip: Collection[str]) -> None:
    """Tied embeddings may be on disk twice, and multi-token prediction has copies of embedding and head. Of two that
    differ one would be lost; transformers does not tie those.

    Raises: HuggingFaceError if they differ, unless `skip` has "lm_head".
    """
    if model.embeddings_are_tied and "lm_head" not in skip and not _are_same(folder, HEAD, EMBEDDING):
        problem = f"tie_word_embeddings = true in {CONFIG_FILE}, but {HEAD} differs from {EMBEDDING}"
        raise HuggingFaceError(folder.path, [f"{problem}; set it to false there, or {_way_out('lm_head')}"])
    for copy, original in copies(model).items():
        if not _are_same(folder, copy, original):
            problem = f"multi-token prediction shares embedding and head, but {copy} differs from {original}"
            raise HuggingFaceError(folder.path, [f"{problem}; with model.mtp.num_depths = 0, {_way_out('mtp')}"])


def _are_same(folder: HuggingFaceFolder, name: str, original: str) -> bool:
    """Whether two tensors have the same bytes, or one is missing."""
    first, second = folder.entries.get(name), folder.entries.get(original)
    if first is None or second is None:
        return True
    if first[1:3] != second[1:3]:
        return False
    num_bytes = prod(first.shape) * FLOATS.get(first.dtype, 1)
    with open_regular(folder.path / first.file) as one, open_regular(folder.path / second.file) as other:
        one.seek(first.begin)
        other.seek(second.begin)
        for done in range(0, num_bytes, COMPARED_BYTES):
            size = min(COMPARED_BYTES, num_bytes - done)
            if one.read(size) != other.read(size):
                return False
    return True


def _way_out(part: str) -> str:
    return f'--skip {part}, or in a recipe checkpoint.load_without = ["{part}"], leaves it out'


def account(
    folder: HuggingFaceFolder, family: Family, model: ModelConfig, pieces: Collection[Piece], skip: Collection[str]
) -> dict[str, list[str]]:
    """Compare the tensors on disk with those of a model: every one is used exactly once.

    Returns: by part that is left out, the names of its tensors.
    Raises: HuggingFaceError that names all that are missing, unknown, or of another shape or dtype.
    """
    problems: list[str] = []
    prefixes: dict[str, tuple[str, ...]] = {part: prefix(model) for part, prefix in family.not_built.items()}
    tied = {"lm_head"} if model.embeddings_are_tied else set()
    if unknown_parts := set(skip) - prefixes.keys() - tied:
        known = f"has {', '.join(prefixes)}" if prefixes else "has none"
        problems.append(f"{named(unknown_parts)} cannot be skipped: {family.model_type} {known} that is not built here")
    expected = {piece.name: piece for piece in pieces}
    if len(expected) < len(pieces):
        problems.append("two tensors of the model have one name on disk")
    unknown = set(folder.entries) - expected.keys()
    if tied:
        unknown.discard(HEAD)  # a copy of the embedding
    unknown -= copies(model).keys()
    skipped = {part: sorted(name for name in unknown if name.startswith(prefix)) for part, prefix in prefixes.items()}
    for part, names in skipped.items():
        unknown -= set(names)
        if names and part not in skip:
            lacks = "is no part of [model]" if part in family.built else "is not built here"
            problems.append(f"{part} {lacks}: {named(names)}; {_way_out(part)}")
    scales = {name for name in unknown if name.endswith(SCALE) and name.removesuffix(SCALE) in expected}
    expected_scales = {piece.scales: piece.shape[:-1] for piece in pieces if piece.scales}
    if lost := unknown - scales - expected_scales.keys():
        problems.append(f"unknown: {named(lost)}")
    if missing := (expected.keys() | expected_scales.keys()) - folder.entries.keys():
        of_mtp = all(name.startswith(prefixes.get("mtp", ())) for name in missing)
        way_out = "; set model.mtp.num_depths = 0" if of_mtp else ""
        problems.append(f"missing: {named(missing)}{way_out}")
    here = [(piece, folder.entries[name]) for name, piece in expected.items() if name in folder.entries]
    if shapes := [
        f"{piece.name} {list(entry.shape)} (the model has {list(piece.shape)})"
        for piece, entry in here
        if entry.shape != piece.shape
    ]:
        problems.append(f"other shapes: {named(shapes)}")
    problems += _quantised(folder, here, scales)
    if wrong := [
        f"{name} {entry.dtype} {list(entry.shape)}"
        for name, shape in expected_scales.items()
        if (entry := folder.entries.get(name)) and (entry.dtype, entry.shape) != (MXFP4, shape)
    ]:
        problems.append(f"scales that are not one {MXFP4} for each {MXFP4_VALUES} values: {named(wrong)}")
    if problems:
        raise HuggingFaceError(folder.path, problems)
    return {part: names for part, names in skipped.items() if names}


def _quantised(
    folder: HuggingFaceFolder, here: Iterable[tuple[Piece, Entry]], scales: Collection[str]
) -> Iterator[str]:
    """What is wrong with the dtypes, and with the scales of weights in fp8."""
    here, size = list(here), folder.block_size
    if others := [
        f"{piece.name} {entry.dtype}"
        for piece, entry in here
        if (entry.dtype != MXFP4 if piece.scales else entry.dtype not in FLOATS and entry.dtype != FP8)
    ]:
        yield f"dtypes that are not read here: {named(others)}"
    weights = {piece.name for piece, entry in here if entry.dtype == FP8}
    if fused := {piece.name for piece, entry in here if entry.dtype == FP8 and (piece.layout or len(entry.shape) != 2)}:
        yield f"in {FP8}, of which single matrices alone are read here: {named(fused)}"
    if without := {name for name in weights if f"{name}{SCALE}" not in scales}:
        yield f"without scales: {named(without)}"
    if needless := {name for name in scales if name.removesuffix(SCALE) not in weights}:
        yield f"scales of weights that are not in {FP8}: {named(needless)}"
    if wrong := [
        f"{name} {list(folder.entries[name].shape)}"
        for name in scales
        if folder.entries[name].shape != tuple(-(-n // size) for n in folder.entries[name.removesuffix(SCALE)].shape)
    ]:
        yield f"scales that are not one for each {size} x {size}: {named(wrong)}"


def named(names: Collection[str]) -> str:
    """The first few in alphabetical order, and how many there are besides."""
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(sorted(names)[:MAX_NAMED]) + rest


def _reason(error: BaseException) -> str:
    return (error.strerror or "") if isinstance(error, OSError) else str(error) or type(error).__name__
