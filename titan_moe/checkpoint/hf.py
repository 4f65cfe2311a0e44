"""Read the weights of a model from a Hugging Face checkpoint, and write one, under any layout.

A tensor on disk is a box of one of ours, and a rank has boxes of ours, so what both share is a strided view of the
rank's memory. DCP's storage for safetensors reads into these views, or writes them: a rank reads its own slices, and no
rank holds the model. Nothing is unpickled.

Several ranks write their slices into files of their own, and then each file of the result is put together by one rank.
"""

import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import WriteItem

from titan_moe.checkpoint import hf_export
from titan_moe.checkpoint.codes import is_scale, load_numbers
from titan_moe.checkpoint.hf_describe import described, moved_bias
from titan_moe.checkpoint.hf_folder import HuggingFaceError, account, named, read_folder, refuse_another_head
from titan_moe.checkpoint.hf_names.families import family_of
from titan_moe.checkpoint.hf_names.family import Family, Values, different_fields
from titan_moe.checkpoint.hf_names.names import Piece
from titan_moe.checkpoint.hf_reader import reader_of
from titan_moe.checkpoint.hf_recipe import without_absent, without_parts
from titan_moe.checkpoint.hf_weights import Model, Weights, not_zero, pieces_of, weights_of
from titan_moe.checkpoint.peft import AdapterFolder
from titan_moe.checkpoint.rank_zero import run_on_rank_zero
from titan_moe.checkpoint.storage import ChunkedTensor, PlainSavePlanner, load_slices, no_rows
from titan_moe.checkpoint.upcycle import different, family_to_upcycle, load_experts, on_disk, parts_of
from titan_moe.config.upcycle import NO_UPCYCLING, UpcycleConfig
from titan_moe.kernels.optim.split_master import store_split
from titan_moe.parameters import Chunk, factors_of, fused_rows, local, local_chunks, remainder_of

SLICES = "slices"
"""Folder in an unfinished export, with what each rank has."""

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def load_hf(
    model: Model,
    folder: str | Path,
    skip: Collection[str] = (),
    upcycle: UpcycleConfig = NO_UPCYCLING,
    seed: int = 0,
) -> dict[str, list[str]]:
    """Load the weights of a model, or of this rank's stages of one, from a Hugging Face checkpoint. Collective.

    Every tensor on disk and every tensor of the model is used exactly once. `skip` names parts that are left out, such
    as "mtp". Weights may be of any layout and dtype; blocks in fp8 and MXFP4 are multiplied by their scales. With
    a granularity in `upcycle` the checkpoint is of a dense model, whose MLPs become experts; `seed` is that of routers.

    Returns: the names of what was left out, by part.
    Raises: HuggingFaceError that names all that does not fit, before anything is loaded.
    """
    path = Path(folder).expanduser()
    with messages() as group:
        weights = weights_of(model, group)
        source = on_first_rank(partial(read_folder, path), group)
        try:
            family = family_to_upcycle(source.config) if upcycle.granularity else family_of(source.config)
            theirs = without_absent(family, family.read(source.config)[0], source.entries)
            if upcycle.granularity:
                differences = different(weights.config, theirs, upcycle.granularity)
                experts = parts_of(weights, upcycle.granularity)
            else:
                experts, differences = [], different_fields(weights.config, without_parts(family, theirs, skip))
            own = source.stored(pieces_of(family, weights.config, weights.shapes))
        except ValueError as error:
            raise HuggingFaceError(path, [str(error)]) from error
        skipped = account(source, family, weights.config, [*own, *on_disk(experts)], skip)
        on_first_rank(partial(refuse_another_head, source, weights.config, skip), group)
        if differences:
            logger.warning("the model differs from %s: %s", path, "; ".join(differences))
        with torch.no_grad():
            split = _split_masters(model, weights.tensors)
            for tensor in (*weights.not_on_disk(family).values(), *map(_remainder, split.values())):
                tensor.zero_()  # a remainder is that of initial weights
            reader = reader_of(source, own)
            agree(partial(_load_pieces, weights, own, reader, split), path, group)
            if upcycle.granularity:
                agree(partial(load_experts, weights, experts, upcycle, seed, reader, split), path, group)
    return skipped


def _split_masters(model: Model, names: Collection[str]) -> dict[str, Tensor]:
    """This rank's weights of these names that have split masters."""
    parts = [model] if isinstance(model, nn.Module) else model
    named = (each for part in parts for each in part.named_parameters(remove_duplicate=False))
    return {name: each for name, each in named if name in names and remainder_of(each) is not None}


def _remainder(parameter: Tensor) -> Tensor:
    """This rank's part of what a split master has besides its weight."""
    return local(vars(parameter)["remainder"])


def _load_pieces(weights: Weights, own: Sequence[Piece], reader: FileSystemReader, split: Mapping[str, Tensor]) -> None:
    """Fill this rank's weights; those that are stored as codes, or in two parts, layer by layer."""

    def read(wide: dict[str, Tensor]) -> None:
        of_layer = [piece for piece in own if piece.ours in wide]
        load_slices(weights._replace(tensors=wide).boxes(of_layer), reader)

    wide = {name for name in weights.codes if not is_scale(name, weights.codes)}
    wide |= split.keys() & {piece.ours for piece in own}
    load_slices(weights.boxes(piece for piece in own if piece.ours not in wide), reader)
    load_numbers({**weights.codes, **split}, wide, read)


def load_adapter(model: Model, folder: str | Path, source: Path | None = None) -> None:
    """Load the adapter of a model, or of this rank's stages of one, from PEFT's files. Collective. `source` has the
    config.json of the base, if there is one.

    Raises: HuggingFaceError for files of another adapter, with their names, ranks or alphas.
    """
    path = Path(folder).expanduser()
    with messages() as group, torch.no_grad():
        weights = weights_of(model, group)
        try:
            own = pieces_of(described(weights.config, source)[0], weights.config, weights.shapes)
        except ValueError as error:
            raise HuggingFaceError(path, [str(error)]) from error

        def load() -> None:
            files = AdapterFolder(path, weights.config, own)
            for part in [model] if isinstance(model, nn.Module) else model:
                parameters, rows = dict(part.named_parameters()), fused_rows(part)
                shapes = {name: parameter.shape for name, parameter in parameters.items()}
                for name, whole in files.factors(factors_of(part), shapes):
                    _store(parameters[name], whole, rows.get(name, ()))

        agree(load, path, group)


def _store(parameter: Tensor, whole: Tensor, rows: tuple[int, ...]) -> None:
    """Copy this rank's slices of a tensor into its parameter, and into the remainder of a split master."""
    remainder = remainder_of(parameter)
    chunks = local_chunks(parameter.detach(), rows)
    rests = [None] * len(chunks) if remainder is None else [each.values for each in local_chunks(remainder, rows)]
    for (values, offsets), rest in zip(chunks, rests, strict=True):
        ranges = zip(offsets, values.shape, strict=True)
        store_split(values, rest, whole[tuple(slice(begin, begin + size) for begin, size in ranges)].to(values.device))


def save_hf(
    model: Model,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    *,
    source: str | Path | None = None,
    tokenizer: str | Path | None = None,
    max_file_bytes: int = hf_export.MAX_FILE_BYTES,
) -> None:
    """Write a model, or all stages of one, as a Hugging Face checkpoint that transformers loads. Collective.

    `dtype` is that of the weights on disk; by default they keep theirs, as buffers always do. `source` is a checkpoint
    or the folder of an import: its config.json, tokenizer and generation files go along. Without one, those of the
    folder `tokenizer` do.

    Raises: HuggingFaceError if no family of Hugging Face computes what the model does, or for a folder that
    is not empty. Nothing is left behind.
    """
    path, origin = Path(folder).expanduser(), Path(source).expanduser() if source else None
    with messages() as group, torch.no_grad():
        on_first_rank(partial(hf_export.refuse_existing, path), group)
        weights, family, config, own, dtypes = exported(model, dtype, path, origin, group)
        files = hf_export.files_of(own, dtypes, max_file_bytes)
        skipped = hf_export.left_out(origin)
        config = hf_export.with_dtype(config, dtypes["norm.weight"], family, skipped)
        boxes = weights.boxes(own)
        with unfinished_folder(path, group) as unfinished:
            if group is None:
                read: hf_export.Read = partial(_copy, boxes)
            else:
                _write_slices(unfinished / SLICES, boxes, files, dtypes, group)
                read = partial(_read_slices, unfinished / SLICES)
            write_files(unfinished, files, dtypes, read, path, group)
            copied = hf_export.to_copy(origin, tokenizer)
            describe = partial(hf_export.write_description, unfinished, files, dtypes, config, copied)
            finish(unfinished, files, describe, skipped, group)


def exported(
    model: Model, dtype: torch.dtype | None, path: Path, origin: Path | None, group: dist.ProcessGroup | None
) -> tuple[Weights, Family, Values, list[Piece], dict[str, torch.dtype]]:
    """This rank's weights, their family, its config.json, and its tensors with their dtypes, by names of ours.
    Collective.

    Raises: HuggingFaceError if no family of Hugging Face computes what the model does.
    """
    weights = weights_of(model, group, merges=True)
    try:
        family, config = described(weights.config, origin)
        own = pieces_of(family, weights.config, weights.shapes)
    except ValueError as error:
        raise HuggingFaceError(path, [str(error)]) from error
    refuse_lost(weights, family, path, group)
    cast = {name: dtype for name in weights.parameters if dtype is not None}
    dtypes = {name: tensor.dtype for name, tensor in weights.tensors.items()} | cast
    dtypes = {name: each for of_rank in agree(lambda: dtypes, path, group) for name, each in of_rank.items()}
    if dtype is None:  # numbers of codes
        codes = [name for name, each in dtypes.items() if each.is_floating_point and each.itemsize == 1]
        dtypes |= dict.fromkeys(codes, dtypes["norm.weight"])
    return weights, family, config, own, dtypes


def refuse_lost(weights: Weights, family: Family, path: Path, group: dist.ProcessGroup | None) -> None:
    """Collective.

    Raises: HuggingFaceError that names weights that the family has no place for, and that are not 0.
    """
    lost = {name for names in agree(lambda: not_zero(weights.not_on_disk(family)), path, group) for name in names}
    if lost:
        raise HuggingFaceError(path, [no_place(family, lost)])


def no_place(family: Family, lost: Collection[str]) -> str:
    """What is wrong with weights that a family lacks."""
    return f"{family.model_type} has no place for {named(lost)}, which are not 0"


def check_exportable(model: Model, source: Path | None, path: Path) -> None:
    """Find out before a run what `save_hf` would refuse after it. Collective.

    Raises: ValueError if no family of Hugging Face computes what the model does, or has a place for biases that are not
    0, or that the run would move.
    """
    with messages() as group:
        weights = weights_of(model, group)
        family = described(weights.config, source)[0]
        pieces_of(family, weights.config, weights.shapes)
        if problem := moved_bias(weights.config, family):
            raise ValueError(problem)
        with torch.no_grad():
            refuse_lost(weights, family, path, group)


def write_files(
    unfinished: Path,
    files: Mapping[str, list[Piece]],
    dtypes: Mapping[str, torch.dtype],
    read: hf_export.Read,
    path: Path,
    group: dist.ProcessGroup | None,
) -> None:
    """Write the files of weights, divided over the ranks."""
    mine = dict(list(files.items())[rank_of(group) :: num_ranks_of(group)])
    agree(partial(hf_export.write_weights, unfinished, mine, dtypes, read), path, group)


def finish(
    unfinished: Path,
    files: Mapping[str, list[Piece]],
    describe: Callable[[], object],
    skipped: Mapping[str, list[str]],
    group: dist.ProcessGroup | None,
) -> None:
    """Write what is not weights, and the hashes of all files, which are read by all ranks."""

    def first() -> None:
        shutil.rmtree(unfinished / SLICES, ignore_errors=True)
        describe()

    on_first_rank(first, group)
    names = [*files, *sorted(file.name for file in unfinished.iterdir() if file.name not in files)]
    mine = names[rank_of(group) :: num_ranks_of(group)]
    hashes = agree(partial(hf_export.hashes_of, unfinished, mine), unfinished, group)
    of_all = {name: each for of_rank in hashes for name, each in of_rank.items()}
    on_first_rank(partial(hf_export.write_manifest, unfinished, of_all, skipped), group)


def _copy(boxes: Mapping[str, ChunkedTensor], tensors: dict[str, Tensor]) -> None:
    """Fill tensors from this rank's, which has all of each."""
    for name, tensor in tensors.items():
        for offsets, values in boxes[name].chunks.items():
            put(tensor, Chunk(values, offsets))


def put(tensor: Tensor, chunk: Chunk) -> None:
    """Write a slice of a tensor into it."""
    ranges = zip(chunk.offsets, chunk.values.shape, strict=True)
    tensor[tuple(slice(begin, begin + size) for begin, size in ranges)] = chunk.values


def _write_slices(
    folder: Path,
    boxes: Mapping[str, ChunkedTensor],
    files: Mapping[str, list[Piece]],
    dtypes: Mapping[str, torch.dtype],
    group: dist.ProcessGroup,
) -> None:
    """Write what each rank has. It has a file for each of the result, and so much is in host memory at a time."""
    numbers = {piece.name: number for number, of_file in enumerate(files.values(), 1) for piece in of_file}
    by_name = {piece.name: dtypes[piece.ours] for of_file in files.values() for piece in of_file}
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=numbers, save_distributed=True)
    dcp.save(dict(boxes), storage_writer=writer, planner=_CastingPlanner(by_name), process_group=group)


def _read_slices(folder: Path, tensors: dict[str, Tensor]) -> None:
    load_slices(tensors, HuggingFaceStorageReader(str(folder)))


class _CastingPlanner(PlainSavePlanner):
    """Save slices in other dtypes than they have."""

    def __init__(self, dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__(no_rows)
        self.dtypes = dtypes

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Cast, and lay out in rows."""
        return object.to(self.dtypes[write_item.index.fqn]).contiguous()


@contextmanager
def messages() -> Iterator[dist.ProcessGroup | None]:
    """A group of all ranks for objects in host memory; None for one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield None
        return
    group = dist.new_group(backend="gloo")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


@contextmanager
def unfinished_folder(path: Path, group: dist.ProcessGroup | None) -> Iterator[Path]:
    """`renamed_at_the_end` of the first rank, for all ranks."""
    entered: list[Any] = []

    def enter() -> None:
        entered.append(hf_export.renamed_at_the_end(path))
        entered[0].__enter__()

    on_first_rank(enter, group)
    try:
        yield hf_export.temporary(path)
    except BaseException as error:
        if entered:
            entered[0].__exit__(type(error), error, error.__traceback__)
        raise
    on_first_rank(lambda: entered[0].__exit__(None, None, None), group)


def on_first_rank(function: Callable[[], Result], group: dist.ProcessGroup | None) -> Result:
    """Call a function on the first rank alone, whose result or error all ranks get."""
    return function() if group is None else run_on_rank_zero(function, group)


def agree(function: Callable[[], Result], path: Path, group: dist.ProcessGroup | None) -> list[Result]:
    """Call a function on every rank, and return the results of all. Collective.

    Raises: the error of this rank; else, if another rank has one, HuggingFaceError with it.
    """
    if group is None:
        return [function()]
    result: Any = None
    failed: BaseException | None = None
    try:
        result = function()
    except Exception as error:  # the other ranks wait for this one
        failed = error
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (result, failed and f"{type(failed).__name__}: {failed}"), group=group)
    if failed is not None:
        raise failed
    if others := [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(answers) if problem]:
        raise HuggingFaceError(path, others)
    return [answer for answer, _ in answers]


def rank_of(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def num_ranks_of(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)
