"""Write and read the files of a checkpoint with torch.distributed.checkpoint. Files are hashed as they are written."""

import hashlib
import io
import os
import pickle
import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from concurrent.futures import Future as SaveFuture
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from titan_moe.checkpoint.folders import METADATA_FILE
from titan_moe.checkpoint.manifest import FileHash, Manifest
from titan_moe.checkpoint.metadata import read_metadata
from titan_moe.config.regular_file import open_regular
from titan_moe.parameters import Chunk, local_chunks

_LARGE_BYTES = 1 << 20
STATES_OF_ALL = ("train_state.step", "train_state.tokens_seen")
"""Of the state of a run, what every checkpoint has. What else one lacks keeps its start value."""
EARLIER_NAMES = {
    "train_state.capacity": "train_state.capacity_factor",
    "train_state.skips": "train_state.num_skipped_in_row",
}
"""The names that checkpoints of earlier versions have for states."""


RowsOf = Callable[[str], tuple[int, ...]]
"""Name in a state dict -> the rows of each matrix of a fused weight or of its moments; empty for others."""


def no_rows(name: str) -> tuple[int, ...]:
    return ()


def save(
    state: dict[str, Any],
    folder: Path,
    description: Manifest,
    group: dist.ProcessGroup | None = None,
    rows_of: RowsOf = no_rows,
    planner: "PlainSavePlanner | None" = None,
) -> SaveFuture[Any] | None:
    """Save a state dict. With a `group` for its messages, copy the state to host memory and save in the background.

    Collective. `description` is needed on rank 0; its files are those that are there already. `planner` takes the place
    of the one with `rows_of`.
    """
    writer, planner = _Writer(folder, description), planner or PlainSavePlanner(rows_of)
    if group is None:
        dcp.save(state, storage_writer=writer, planner=planner)
        return None
    stager = DefaultStager(StagingOptions(False, False, False, False))
    future = dcp.async_save(state, storage_writer=writer, planner=planner, process_group=group, async_stager=stager)
    future.add_done_callback(lambda _: stager.close())
    return future


def load(state: dict[str, Any], folder: "Path | PlainReader", rows_of: RowsOf = no_rows) -> None:
    """Load a checkpoint into a state dict. Nothing that the files name is run. Collective."""
    reader = folder if isinstance(folder, PlainReader) else PlainReader(folder)
    dcp.load(state, storage_reader=reader, planner=PlainLoadPlanner(rows_of))


def load_slices(slices: "Mapping[str, ChunkedTensor | torch.Tensor]", reader: FileSystemReader) -> None:
    """Fill slices of tensors from a checkpoint, on this rank alone.

    Raises: ValueError with one sentence for what cannot be read.
    """
    try:
        with alone():
            dcp.load({}, storage_reader=reader, planner=_SlicesPlanner(slices), no_dist=True)
    except CheckpointException as error:
        raise ValueError(reasons_of(error)) from error


def reasons_of(error: CheckpointException) -> str:
    """What failed on each rank, in words."""
    failures = [failure[0] for failure in error.failures.values()]
    return "; ".join(sorted({str(failure) or type(failure).__name__ for failure in failures}))


@contextmanager
def alone() -> Iterator[None]:
    """Silence DCP's warning that there are no other ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.distributed is disabled")
        yield


class ChunkedTensor:
    """A tensor of which this rank has some slices, as DCP asks for it."""

    def __init__(self, size: Sequence[int], chunks: Iterable[Chunk]) -> None:
        self.full_size, self.chunks = torch.Size(size), {torch.Size(chunk.offsets): chunk.values for chunk in chunks}

    def size(self) -> torch.Size:
        return self.full_size

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets, values.size()),
                    properties=TensorProperties.create_from_tensor(values),
                    size=self.size(),
                ),
            )
            for offsets, values in self.chunks.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, values.size()) for offsets, values in self.chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.chunks[torch.Size(index.offset or ())]


def _in_chunks(state: dict[str, Any], rows_of: RowsOf) -> dict[str, Any]:
    """Replace the DTensors that have their rows in another order than the model."""
    chunks = {
        name: local_chunks(tensor, rows_of(name)) for name, tensor in state.items() if isinstance(tensor, DTensor)
    }
    several = {name: ChunkedTensor(state[name].size(), parts) for name, parts in chunks.items() if len(parts) > 1}
    return {**state, **several}


@dataclass(frozen=True)
class _HashedResult(WriteResult):
    """What a rank has written, with the hash of its file. DCP gathers these on rank 0."""

    file: FileHash


class _HashedFile(io.BufferedWriter):
    """A new file with the hash of what is written to it. Large tensors are hashed while they are written."""

    def __init__(self, path: str | os.PathLike[str], hasher: Executor) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._hasher = hasher
        self._sha256 = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: Any) -> int:
        num_bytes = memoryview(data).nbytes
        self._num_bytes += num_bytes
        if num_bytes < _LARGE_BYTES:
            self._sha256.update(data)
            return super().write(data)
        hashing = self._hasher.submit(self._sha256.update, data)
        try:
            return super().write(data)
        finally:
            hashing.result()  # `data` is valid until this call returns

    @property
    def hash(self) -> FileHash:
        return FileHash(self._num_bytes, self._sha256.hexdigest())


class _HashingFiles(FileSystem):
    """Local files. The manifest is written when all other files are there but the metadata has not its name yet."""

    def __init__(self, description: Manifest) -> None:
        self.hashes: dict[str, FileHash] = {}
        self._description = description

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with ThreadPoolExecutor(1) as hasher, _HashedFile(path, hasher) as file:
            yield file
        self.hashes[Path(path).name] = file.hash

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Name the finished metadata file, which makes the checkpoint complete."""
        path, new_path = Path(path), Path(new_path)
        read_metadata(path)  # a save that could not be loaded fails now
        self.hashes[new_path.name] = self.hashes.pop(path.name)
        replace(self._description, files=self._description.files | self.hashes).write(path.parent)
        super().rename(path, new_path)


class _Writer(FileSystemWriter):
    """DCP's writer of files, with a manifest."""

    def __init__(self, folder: Path, description: Manifest) -> None:
        super().__init__(folder)
        self.fs = _HashingFiles(description)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for part in planner.files(plan) if isinstance(planner, PlainSavePlanner) else [plan]:
            results += super().write_data(part, planner).wait()
        hashed: Future[list[WriteResult]] = Future()
        hashed.set_result([self._add_hash(result) for result in results])
        return hashed

    def _add_hash(self, result: WriteResult) -> _HashedResult:
        hash_ = self.fs.hashes[result.storage_data.relative_path]
        return _HashedResult(result.index, result.size_in_bytes, result.storage_data, hash_)

    def finish(self, metadata: Metadata, results: list[list[_HashedResult]]) -> None:
        self.fs.hashes = {result.storage_data.relative_path: result.file for rank in results for result in rank}
        super().finish(metadata, results)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)


class _NamingFiles(FileSystem):
    """Local files to read. What is wrong with the content of one is told with its name."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with open_regular(path) as stream:
            try:
                yield stream
            except pickle.UnpicklingError as error:
                raise ValueError(f"{Path(path).name}: a tensor {_what_is_named(error)}") from error
            except ValueError as error:
                raise ValueError(f"{Path(path).name}: {error}") from error


class PlainReader(FileSystemReader):
    """DCP's reader of files, which would run what the metadata file names. It reads that file once for all loads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _NamingFiles()

    @cached_property
    def metadata(self) -> Metadata:
        """What the checkpoint holds."""
        return read_metadata(Path(self.path) / METADATA_FILE)

    def read_metadata(self) -> Metadata:
        self.metadata.storage_meta.load_id = self.load_id
        return self.metadata


class PlainSavePlanner(DefaultSavePlanner):
    """Refuse to save what could not be loaded: values that are not plain data. Save slices of the full tensors."""

    state_dict: dict[str, Any]

    def __init__(self, rows_of: RowsOf) -> None:
        super().__init__()
        self.rows_of = rows_of

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = _in_chunks(self.state_dict, self.rows_of)

    def files(self, plan: SavePlan) -> Iterable[SavePlan]:
        """What this rank writes, a plan for each file."""
        return [plan]

    def lookup_object(self, index: MetadataIndex) -> Any:
        own = self.state_dict[index.fqn]
        return own.__get_tensor_shard__(index) if isinstance(own, ChunkedTensor) else super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        saved = super().transform_object(write_item, object)
        if isinstance(saved, io.BytesIO):
            _load_plain(saved, write_item.index.fqn)
        return saved


class PlainLoadPlanner(DefaultLoadPlanner):
    """Load numbers, strings, tensors, and lists and dicts of them. DCP's planner would run what a value names."""

    state_dict: dict[str, Any]

    def __init__(self, rows_of: RowsOf) -> None:
        super().__init__()
        self.rows_of = rows_of

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is not None:
            self._rename_states(metadata.state_dict_metadata)
        self.state_dict = _in_chunks(self.state_dict, self.rows_of)

    def _rename_states(self, saved: Container[str]) -> None:
        """Ask for the states of a run by the names that the checkpoint has, and not for those that it lacks."""
        own = [name for name in self.state_dict if name.startswith("train_state.") and name not in STATES_OF_ALL]
        for name in (name for name in own if name not in saved):
            value, earlier = self.state_dict.pop(name), EARLIER_NAMES.get(name, "")
            if earlier in saved:
                self.state_dict[earlier], self.mappings[earlier] = value, self.mappings[name]

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        own = self.state_dict[index.fqn]
        return own.__get_tensor_shard__(index) if isinstance(own, ChunkedTensor) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(_load_plain(value, read_item.storage_index.fqn), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)  # which unpickles what has just been pickled here


class _SlicesPlanner(PlainLoadPlanner):
    """Load slices of tensors."""

    def __init__(self, slices: Mapping[str, ChunkedTensor | torch.Tensor]) -> None:
        super().__init__(no_rows)
        self.slices = slices

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = dict(self.slices)  # only now: DCP's planner makes None of objects that it does not know


def _what_is_named(error: pickle.UnpicklingError) -> str:
    """One sentence for the refusal of torch.load, whose own text suggests to run the file."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named is None:
        return "is damaged, or is not plain data"
    return f"names {named[1]}, which is not data; nothing of it was run"


def _load_plain(value: io.BytesIO, name: str) -> Any:
    value.seek(0)
    try:
        return torch.load(value, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{name} {_what_is_named(error)}") from error
