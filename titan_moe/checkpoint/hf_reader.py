"""DCP's readers of safetensors, for the files that an index lists, and for weights in fp8 and MXFP4."""

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from titan_moe.checkpoint.hf_folder import FP8, HuggingFaceFolder
from titan_moe.checkpoint.hf_names.names import MXFP4_VALUES, Layout, Piece
from titan_moe.plan.cost.hugging_face import MAX_READ_BYTES, READ_THREADS

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of E2M1 without the sign, which is the highest of 4 bits."""
E8M0_BIAS = 127
Slices = tuple[slice, ...]


def reader_of(source: HuggingFaceFolder, pieces: Iterable[Piece]) -> HuggingFaceStorageReader:
    """The reader of the tensors of a model, which reads headers once for all loads."""
    is_quantised = any(entry.dtype == FP8 for entry in source.entries.values())
    return _QuantizedReader(source, pieces) if is_quantised else _Reader(source, pieces)


class _ListedFiles(FileSystem):
    """The files of a checkpoint that its index lists, whatever lies beside them."""

    def __init__(self, files: Collection[str]) -> None:
        self.files = files

    def ls(self, path: str) -> list[str]:
        """The same for any folder."""
        return [str(Path(path) / file) for file in self.files]


class _Reader(HuggingFaceStorageReader):
    """Reads weights as they are, and those with a layout as tensors of the shape `Piece.view`."""

    def __init__(self, source: HuggingFaceFolder, pieces: Iterable[Piece], *options: Any) -> None:
        super().__init__(str(source.path), 1, *options)
        self.fs = _ListedFiles(source.files)
        self.weight_map = {name: entry.file for name, entry in source.entries.items()}
        self.pieces = {piece.name: piece for piece in pieces if piece.layout is not None}
        self.known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Read the headers, the first time."""
        if self.known is None:
            self.known = super().read_metadata()
            for name, piece in self.pieces.items():
                _show(self.known, name, torch.Size(piece.view))
        return self.known

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read some files at a time. DCP's own threads lose the reason of a failure, and the file.

        Raises: ValueError that names the file.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        with ThreadPoolExecutor(READ_THREADS) as pool:
            list(pool.map(lambda file: self._read_file(file, by_file[file], planner), by_file))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, file: str, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        from safetensors import safe_open

        try:
            with safe_open(file, framework="pt") as opened:
                for item in items:
                    self._process_read_request(opened, item, planner)
        except Exception as error:
            raise ValueError(f"{file} cannot be read: {error}") from error

    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        piece = self.pieces.get(req.storage_index.fqn)
        if piece is None or piece.layout is None:
            super()._process_read_request(f, req, planner)
            return
        target = planner.resolve_tensor(req).detach()
        box = [slice(begin, begin + size) for begin, size in zip(req.storage_offsets, req.lengths, strict=True)]
        rows = max(1, MAX_READ_BYTES // (prod(req.lengths[1:]) * torch.float32.itemsize))
        begins = [*range(box[0].start, box[0].stop, rows), box[0].stop]
        for part, (begin, end) in zip(target.split(rows), pairwise(begins), strict=True):
            part.copy_(self._read(f, piece, piece.layout, (slice(begin, end), *box[1:])))
        planner.commit_tensor(req, target)

    def _read(self, file: Any, piece: Piece, layout: Layout, box: Slices) -> Tensor:
        """A box of a tensor as `Piece.view` has it."""
        ranges, inner, begin = [], [], 0
        for sizes in layout.parts:
            slices = box[begin : begin + len(sizes)]
            begin += len(sizes)
            ranges.append(_covering(slices, sizes))
            inner.append((slices, sizes))
        values = self._mxfp4(file, piece, tuple(ranges)) if piece.scales else file.get_slice(piece.name)[tuple(ranges)]
        for dim, (slices, sizes) in reversed(list(enumerate(inner))):
            values = _narrowed(values, dim, slices, sizes)
        return values

    def _mxfp4(self, file: Any, piece: Piece, box: Slices) -> Tensor:
        """Values of E2M1, two a byte with the lower bits first, times a power of two for each block."""
        from safetensors import safe_open

        *rows, columns = box
        first, last = columns.start // MXFP4_VALUES, -(-columns.stop // MXFP4_VALUES)
        codes = file.get_slice(piece.name)[(*rows, slice(first, last))]
        with safe_open(Path(self.path) / self.weight_map[str(piece.scales)], framework="pt") as scales_file:
            scales = scales_file.get_slice(str(piece.scales))[(*rows, slice(first, last))]
        of_byte = torch.tensor(FP4 + tuple(-value for value in FP4))
        of_byte = torch.stack([of_byte.repeat(16), of_byte.repeat_interleave(16)], dim=1)
        values = of_byte[codes.int()].flatten(-2)
        values = torch.ldexp(values, scales.int()[..., None] - E8M0_BIAS).flatten(-2)
        return values[..., columns.start - first * MXFP4_VALUES :][..., : columns.stop - columns.start]


class _QuantizedReader(_Reader, QuantizedHuggingFaceStorageReader):
    """Reads weights in fp8, also without an index file."""

    def __init__(self, source: HuggingFaceFolder, pieces: Iterable[Piece]) -> None:
        super().__init__(source, pieces, torch.float32, source.block_size)

    def _load_quantization_metadata(self) -> None:
        self._build_weight_scale_mapping(self.weight_map)


def _show(metadata: Metadata, name: str, shape: torch.Size) -> None:
    """Give a tensor another shape."""
    tensor, files = metadata.state_dict_metadata[name], metadata.storage_data
    old, new = ([0] * number for number in (len(tensor.chunks[0].sizes), len(shape)))
    tensor.size, tensor.chunks = shape, [ChunkStorageMetadata(torch.Size(new), shape)]
    files[MetadataIndex(name, new)] = files.pop(MetadataIndex(name, old))


def _covering(slices: Slices, sizes: tuple[int, ...]) -> slice:
    """The range of a dimension on disk that has a box of the dimensions that it consists of."""
    if len(sizes) < 2:
        return slices[0] if sizes else slice(0, 1)
    (outer, inner), size = slices, sizes[1]
    whole = slice(inner.start, inner.stop) if outer.stop - outer.start == 1 else slice(0, size)
    return slice(outer.start * size + whole.start, (outer.stop - 1) * size + whole.stop)


def _narrowed(values: Tensor, dim: int, slices: Slices, sizes: tuple[int, ...]) -> Tensor:
    """The box of what `_covering` has in a dimension."""
    if len(sizes) < 2:
        return values if sizes else values.squeeze(dim)
    outer, inner = slices
    number = outer.stop - outer.start
    values = values.unflatten(dim, (number, -1))
    return values if number == 1 else values.narrow(dim + 1, inner.start, inner.stop - inner.start)
