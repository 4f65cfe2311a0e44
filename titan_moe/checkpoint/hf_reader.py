"""DCP's readers of safetensors, for the files that an index lists, and for weights in fp8."""

from collections.abc import Collection
from pathlib import Path

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata

from titan_moe.checkpoint.hf_folder import FP8, HuggingFaceFolder

READ_THREADS = 4


def reader_of(source: HuggingFaceFolder) -> HuggingFaceStorageReader:
    """The reader of a checkpoint, which reads its headers once for all loads."""
    is_quantised = any(entry.dtype == FP8 for entry in source.entries.values())
    return _QuantizedReader(source) if is_quantised else _Reader(source)


class _ListedFiles(FileSystem):
    """The files of a checkpoint that its index lists, whatever lies beside them."""

    def __init__(self, files: Collection[str]) -> None:
        self.files = files

    def ls(self, path: str) -> list[str]:
        """The same for any folder."""
        return [str(Path(path) / file) for file in self.files]


class _Reader(HuggingFaceStorageReader):
    """Reads weights as they are."""

    def __init__(self, source: HuggingFaceFolder) -> None:
        super().__init__(str(source.path), READ_THREADS)
        self.fs = _ListedFiles(source.files)
        self.known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Read the headers, the first time."""
        self.known = self.known or super().read_metadata()
        return self.known


class _QuantizedReader(QuantizedHuggingFaceStorageReader):
    """Reads weights in fp8, also without an index file."""

    def __init__(self, source: HuggingFaceFolder) -> None:
        super().__init__(str(source.path), READ_THREADS, torch.float32, source.block_size)
        self.fs = _ListedFiles(source.files)
        self.weight_map = {name: entry.file for name, entry in source.entries.items()}
        self.known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Read the headers, the first time."""
        self.known = self.known or super().read_metadata()
        return self.known

    def _load_quantization_metadata(self) -> None:
        self._build_weight_scale_mapping(self.weight_map)
