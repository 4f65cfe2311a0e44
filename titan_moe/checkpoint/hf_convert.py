"""Convert checkpoints from Hugging Face's form into this package's and back, tensor by tensor, without a model.

Several processes divide the files that are written, and each reads the slices of its own. Which files there are, and
what is in them, does not depend on their number.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from titan_moe.checkpoint import hf_export, storage
from titan_moe.checkpoint.base import lacks
from titan_moe.checkpoint.codes import numbers_of_chunk
from titan_moe.checkpoint.ema import lacks_averages, reader_of_weights
from titan_moe.checkpoint.find import HUGGING_FACE
from titan_moe.checkpoint.folders import METADATA_FILE
from titan_moe.checkpoint.hf import (
    agree,
    finish,
    messages,
    no_place,
    num_ranks_of,
    on_first_rank,
    put,
    rank_of,
    unfinished_folder,
    write_files,
)
from titan_moe.checkpoint.hf_describe import described
from titan_moe.checkpoint.hf_folder import (
    FP8,
    MXFP4,
    HuggingFaceError,
    HuggingFaceFolder,
    account,
    read_folder,
    refuse_another_head,
)
from titan_moe.checkpoint.hf_names.families import family_of
from titan_moe.checkpoint.hf_names.family import flat, of_flat
from titan_moe.checkpoint.hf_names.names import Piece, Shape, split_name
from titan_moe.checkpoint.hf_reader import reader_of
from titan_moe.checkpoint.hf_weights import box_of, not_zero, pieces_of
from titan_moe.checkpoint.manifest import Manifest, find_damage, read_manifest
from titan_moe.checkpoint.merged import merged
from titan_moe.checkpoint.peft import save_adapter
from titan_moe.checkpoint.storage import ChunkedTensor, PlainReader, PlainSavePlanner, load_slices
from titan_moe.config import Recipe, RecipeError
from titan_moe.config.adapter import KINDS, AdapterConfig, AdapterOfKind
from titan_moe.config.model import ModelConfig
from titan_moe.config.renamed import values_before
from titan_moe.config.resume import flatten
from titan_moe.parameters import SCALES, Chunk, Factors

MAX_CHUNK_BYTES = 1 << 29
"""Of a tensor that is in host memory at a time."""
MAX_FILE_BYTES = 1 << 31
"""Of a file of an imported checkpoint."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, FP8: torch.bfloat16}
DTYPES[MXFP4] = torch.bfloat16
"""Of a tensor on disk -> of the same in a checkpoint of ours."""


def import_hf(
    recipe: Recipe, shapes: Mapping[str, Shape], hf_folder: Path, checkpoint: Path, skip: Collection[str] = ()
) -> dict[str, list[str]]:
    """Write the weights of a Hugging Face checkpoint as a checkpoint that `checkpoint.load_from` takes. Collective.

    `shapes` are those of the tensors of the recipe's model. Tokenizer and generation files go along.

    Returns: the names of what was left out, by part.
    Raises: HuggingFaceError that names all that does not fit. Then nothing is left behind.
    """
    source = read_folder(hf_folder)
    try:
        family = family_of(source.config)
        own = source.stored(pieces_of(family, recipe.model, shapes))
    except ValueError as error:
        raise HuggingFaceError(hf_folder, [str(error)]) from error
    skipped = account(source, family, recipe.model, own, skip)
    planner = _ReadingPlanner(source, own)
    chunks = {name: list(planned(shape, planner.dtypes[name])) for name, shape in shapes.items()}
    planner.file_of = _files(chunks)
    num_files = max(planner.file_of.values()) + 1
    with messages() as group:
        on_first_rank(partial(refuse_another_head, source, recipe.model, skip), group)
        on_first_rank(partial(hf_export.refuse_existing, checkpoint), group)
        begin, end = (num_files * rank // num_ranks_of(group) for rank in (rank_of(group), rank_of(group) + 1))
        state = {
            name: ChunkedTensor(
                shapes[name],
                [chunk for chunk in of_name if begin <= planner.file_of[name, tuple(chunk.offsets)] < end],
            )
            for name, of_name in chunks.items()
        }
        with unfinished_folder(checkpoint, group) as unfinished, storage.alone():
            keep = partial(hf_export.keep_source, hf_folder, unfinished, skipped)
            files = on_first_rank(keep, group)
            storage.save(state, unfinished, Manifest(flatten(recipe), "", files), planner=planner)
    return skipped


def _files(chunks: Mapping[str, Iterable[Chunk]]) -> dict[tuple[str, Shape], int]:
    """The number of the file of each slice, by the name of its tensor and its offsets."""
    slices = [(name, chunk) for name, of_name in chunks.items() for chunk in of_name]
    ends = accumulate(chunk.values.nbytes for _, chunk in slices)
    numbers = [(end - 1) // MAX_FILE_BYTES for end in ends]
    known = {number: place for place, number in enumerate(sorted(set(numbers)))}  # a large slice leaves numbers out
    return {(name, tuple(chunk.offsets)): known[number] for (name, chunk), number in zip(slices, numbers, strict=True)}


def planned(shape: Shape, dtype: torch.dtype) -> Iterator[Chunk]:
    """A tensor in slices of its first dimension, of which none needs much memory."""
    row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
    rows = max(1, min(shape[0], MAX_CHUNK_BYTES // row_bytes))
    for start in range(0, shape[0], rows):
        values = torch.empty((min(rows, shape[0] - start), *shape[1:]), dtype=dtype, device="meta")
        yield Chunk(values, (start, *(0 for _ in shape[1:])))


class _ReadingPlanner(PlainSavePlanner):
    """Reads a slice when it is to be written."""

    def __init__(self, source: HuggingFaceFolder, own: Collection[Piece]) -> None:
        super().__init__(storage.no_rows)
        self.reader = reader_of(source, own)
        self.pieces: dict[str, list[Piece]] = {}
        for piece in own:
            self.pieces.setdefault(piece.ours, []).append(piece)
        if "embed.weight" in self.pieces:
            self.pieces.setdefault("head.weight", self.pieces["embed.weight"])  # tied
        self.dtypes = _Dtypes(source, self.pieces)
        self.file_of: dict[tuple[str, Shape], int] = {}

    def files(self, plan: SavePlan) -> Iterator[SavePlan]:
        """Those of `file_of`, under names that do not tell which process has written them."""

        def number(item: Any) -> int:
            return self.file_of[item.index.fqn, tuple(item.index.offset or ())]

        for file, items in groupby(sorted(plan.items, key=number), number):
            yield replace(plan, items=list(items), storage_data=replace(plan.storage_data, prefix=f"__{file}_"))

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The slice, zero where it is not on disk."""
        meta = super().lookup_object(index)
        fill = torch.empty_like if index.fqn in self.pieces else torch.zeros_like
        values = fill(meta, device="cpu")
        chunk = Chunk(values, tuple(index.offset or ()))
        boxes = {piece.name: list(box_of(chunk, piece)) for piece in self.pieces.get(index.fqn, ())}
        shapes = {piece.name: piece.view for piece in self.pieces.get(index.fqn, ())}
        slices = {name: ChunkedTensor(shapes[name], shared) for name, shared in boxes.items() if shared}
        load_slices(slices, self.reader)
        return values


class _Dtypes(dict[str, torch.dtype]):
    """By name of ours: the widest dtype on disk, fp32 for what is not on disk."""

    def __init__(self, source: HuggingFaceFolder, own: Mapping[str, Collection[Piece]]) -> None:
        for ours, cut in own.items():
            dtypes = {DTYPES[source.entries[piece.name].dtype] for piece in cut}
            self[ours] = max(dtypes, key=lambda dtype: dtype.itemsize)

    def __missing__(self, name: str) -> torch.dtype:
        return torch.float32


def model_of(checkpoint: Path) -> ModelConfig:
    """The `[model]` of a checkpoint, as its manifest has it, with its adapters.

    Raises: HuggingFaceError for a folder that is no complete checkpoint, or has no manifest.
    """
    try:
        manifest = read_manifest(checkpoint) if (checkpoint / METADATA_FILE).is_file() else None
    except (OSError, ValueError) as error:
        raise HuggingFaceError(checkpoint, [str(error)]) from error
    if manifest is None:
        raise HuggingFaceError(checkpoint, ["it is no complete checkpoint with a manifest; name a folder `step-N`"])
    fields = manifest.recipe | values_before(manifest.recipe)
    known = {key: f"model.{'class' if key == 'class_' else key}" for key in flat(ModelConfig())}
    base = of_flat({key: fields[dotted] for key, dotted in known.items() if dotted in fields})
    return replace(base, adapter=_adapter_of(fields))


def _adapter_of(fields: Mapping[str, Any]) -> AdapterConfig:
    """The adapters that the fields of a recipe say."""

    def own(section: Any, prefix: str) -> dict[str, Any]:
        values = {name: fields[f"{prefix}{name}"] for name in vars(section) if f"{prefix}{name}" in fields}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    values: dict[str, Any] = own(AdapterConfig(), "model.adapter.")
    values |= {kind: AdapterOfKind(**own(AdapterOfKind(), f"model.adapter.{kind}.")) for kind in KINDS}
    return AdapterConfig(**values)


def export_hf(
    model: ModelConfig,
    shapes: Mapping[str, Shape],
    checkpoint: Path,
    folder: Path,
    dtype: torch.dtype | None = None,
    factors: Mapping[str, Factors] | None = None,
    *,
    is_ema: bool = False,
) -> None:
    """Write the weights of a checkpoint, or with `is_ema` their averages, as one that transformers loads. Collective.

    `shapes` are those of the tensors of the model. `dtype` is that of the weights on disk; None keeps theirs. `factors`
    are the adapters of weights, to which they are added.

    Raises: HuggingFaceError if the checkpoint is damaged or not of this model, or no family computes what it does. Then
    nothing is left behind.
    """
    with messages() as group:
        on_first_rank(partial(hf_export.refuse_existing, folder), group)
        _export(model, shapes, _reader_of(checkpoint, is_ema), checkpoint, folder, dtype, factors or {}, group)


def _reader_of(checkpoint: Path, is_ema: bool) -> PlainReader:
    """Raises: RecipeError for a checkpoint without averages."""
    if is_ema and (problem := lacks_averages(checkpoint)):
        raise RecipeError([problem])
    return reader_of_weights(checkpoint, is_ema=is_ema)


def export_adapter(
    model: ModelConfig,
    shapes: Mapping[str, Shape],
    checkpoint: Path,
    folder: Path,
    factors: Mapping[str, Factors],
    *,
    is_fused: bool = False,
    is_ema: bool = False,
) -> None:
    """Write the adapter of a checkpoint, or with `is_ema` its average, as PEFT's files, with a matrix for each expert,
    or in the form of `target_parameters`.

    Raises: HuggingFaceError if the checkpoint is damaged or has no adapter, or a form does not exist; RecipeError if it
    has no averages. Then nothing is left behind.
    """
    if not factors:
        raise HuggingFaceError(checkpoint, ["it has no adapter; export it without --adapter"])
    reader, manifest = _reader_of(checkpoint, is_ema), read_manifest(checkpoint)
    try:
        saved = reader.metadata.state_dict_metadata
        family, _ = described(model, hf_export.source_of(checkpoint))
        own = pieces_of(family, model, _without(factors, shapes))
    except ValueError as error:
        raise HuggingFaceError(checkpoint, [str(error)]) from error
    damage = [] if manifest is None else find_damage(checkpoint, list(manifest.files.items()))
    names = {name for each in factors.values() for name in (each.a, each.b)}
    if problems := [*_differences(saved, {name: shapes[name] for name in names}), *damage]:
        raise HuggingFaceError(checkpoint, problems)
    source = str(manifest.recipe.get("checkpoint.load_from", "")) if manifest else ""
    base = source.removeprefix(HUGGING_FACE) if source.startswith(HUGGING_FACE) else ""
    read = partial(_read_whole, reader, shapes)
    save_adapter(folder, model, factors, own, read, base=base, is_fused=is_fused)


def _without(factors: Mapping[str, Factors], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The tensors of the base."""
    names = {name for each in factors.values() for name in (each.a, each.b)}
    return {name: shape for name, shape in shapes.items() if name not in names}


def _read_whole(reader: PlainReader, shapes: Mapping[str, Shape], name: str) -> Tensor:
    """A tensor of a checkpoint, whole, in its dtype."""
    values = torch.empty(shapes[name], dtype=reader.metadata.state_dict_metadata[name].properties.dtype)
    load_slices({name: ChunkedTensor(shapes[name], [Chunk(values, (0,) * values.ndim)])}, reader)
    return values


def _export(
    model: ModelConfig,
    shapes: Mapping[str, Shape],
    reader: PlainReader,
    checkpoint: Path,
    folder: Path,
    dtype: torch.dtype | None,
    factors: Mapping[str, Factors],
    group: dist.ProcessGroup | None,
) -> None:
    origin = hf_export.source_of(checkpoint)
    try:
        saved, manifest = reader.metadata.state_dict_metadata, read_manifest(checkpoint)
    except ValueError as error:
        raise HuggingFaceError(checkpoint, [str(error)]) from error
    if manifest is not None and (words := lacks(manifest.recipe)):
        alone = "; --adapter writes the adapter alone" if factors else ""
        at_end = "a run with checkpoint.export_hf_at_end = true writes whole weights at its end"
        raise HuggingFaceError(checkpoint, [f"{words}, and an export reads one checkpoint{alone}; {at_end}"])
    problems, all_shapes = list(_differences(saved, shapes)), shapes
    shapes = _without(factors, all_shapes)
    if manifest is not None:
        mine = list(manifest.files.items())[rank_of(group) :: num_ranks_of(group)]
        damages = agree(partial(find_damage, checkpoint, mine), checkpoint, group)
        problems += [damage for of_rank in damages for damage in of_rank]
    try:
        family, config = described(model, origin)
        own = pieces_of(family, model, shapes)
    except ValueError as error:
        raise HuggingFaceError(checkpoint, [*problems, str(error)]) from error
    if problems:
        raise HuggingFaceError(checkpoint, problems)
    named = {piece.ours for piece in own}
    lacking = {name: torch.empty(shape) for name, shape in shapes.items() if name not in named and _is_lost(name)}
    load_slices(lacking, reader)
    if lost := not_zero(lacking):
        raise HuggingFaceError(checkpoint, [no_place(family, lost)])
    dtypes = {name: saved[name].properties.dtype for name in shapes}
    dtypes |= {name: dtypes["norm.weight"] for name in shapes if f"{name}{SCALES}" in saved}  # numbers of codes
    if dtype is not None:
        dtypes |= dict.fromkeys((name for name in dtypes if not _is_lost(name)), dtype)
    files = hf_export.files_of(own, dtypes, hf_export.MAX_FILE_BYTES)
    skipped = hf_export.left_out(origin)
    config = hf_export.with_dtype(config, dtypes["norm.weight"], family, skipped)
    by_name = {piece.name: piece for piece in own}
    with unfinished_folder(folder, group) as unfinished:
        read = partial(_read_checkpoint, reader, by_name, all_shapes, factors)
        write_files(unfinished, files, dtypes, read, folder, group)
        copied = hf_export.to_copy(origin, manifest.recipe.get("data.tokenizer") if manifest else None)
        describe = partial(hf_export.write_description, unfinished, files, dtypes, config, copied)
        finish(unfinished, files, describe, skipped, group)


def _is_lost(name: str) -> bool:
    """Whether it is no weight, but what balances the load."""
    return split_name(name)[1].endswith("router.expert_bias_E")


def _differences(saved: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Iterator[str]:
    if missing := [name for name in shapes if name not in saved]:
        yield f"missing: {', '.join(missing)}"
    for name, shape in shapes.items():
        if name in saved and tuple(saved[name].size) != shape:
            yield f"{name} {list(saved[name].size)} (the model has {list(shape)})"


def _read_checkpoint(
    reader: PlainReader,
    pieces: Mapping[str, Piece],
    shapes: Mapping[str, Shape],
    factors: Mapping[str, Factors],
    tensors: dict[str, Tensor],
) -> None:
    """Fill tensors on disk from ours, some saved slices at a time: DCP reads one anew for every part of it. Adapters
    are added."""
    by_ours: dict[str, list[Piece]] = {}
    for name in tensors:
        by_ours.setdefault(pieces[name].ours, []).append(pieces[name])
    for ours, cut in by_ours.items():
        shape = shapes[ours]
        saved = reader.metadata.state_dict_metadata[ours]
        adapter, scales = factors.get(ours), None
        if (of_codes := reader.metadata.state_dict_metadata.get(f"{ours}{SCALES}")) is not None:
            scales = _read_whole(reader, {f"{ours}{SCALES}": tuple(of_codes.size)}, f"{ours}{SCALES}")
        a, b = (_read_whole(reader, shapes, name) for name in (adapter.a, adapter.b)) if adapter else (None, None)
        first, last = min(_rows(piece)[0] for piece in cut), max(_rows(piece)[1] for piece in cut)
        row_bytes = torch.Size(shape[1:]).numel() * saved.properties.dtype.itemsize
        for begin, end in _ranges(first, last, {chunk.offsets[0] for chunk in saved.chunks}, row_bytes):
            values = torch.empty((end - begin, *shape[1:]), dtype=saved.properties.dtype)
            chunk = Chunk(values, (begin, *(0 for _ in shape[1:])))
            load_slices({ours: ChunkedTensor(shape, [chunk])}, reader)
            if scales is not None:
                chunk = numbers_of_chunk(chunk, scales)
            if adapter is not None and a is not None and b is not None:
                chunk = chunk._replace(values=merged(chunk.values, adapter, a, b, chunk.offsets))
            for piece in cut:
                for box in box_of(chunk, piece):
                    put(tensors[piece.name], box)


def _ranges(first: int, last: int, begins: Collection[int], row_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are read at a time: whole saved slices, which begin at `begins`, and not many bytes."""
    begin, end = first, first
    for border in [*sorted(row for row in begins if first < row < last), last]:
        if end > begin and (border - begin) * row_bytes > MAX_CHUNK_BYTES:
            yield begin, end
            begin = end
        end = border
    yield begin, end


def _rows(piece: Piece) -> tuple[int, int]:
    """The first dimension of ours that a tensor on disk has, from where to where."""
    first = piece.box[0]
    return (first, first + 1) if isinstance(first, int) else (first.start, first.stop)
