"""Read the metadata file of torch.distributed.checkpoint. It is a pickle, and a pickle can name any function to call.

Only what such metadata consists of may be named here: the classes of DCP's description of tensors, dtypes, and sizes.
None of them does more than to hold values.
"""

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from titan_moe.checkpoint.folders import METADATA_FILE

_CLASSES = (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
    TensorProperties,
    ChunkStorageMetadata,
    BytesStorageMetadata,
    StorageMeta,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
)


def _path(*parts: str) -> str:
    """Stands for the class of a path, of which only the text is kept."""
    return str(PurePosixPath(*parts))


ALLOWED: dict[tuple[str, str], Any] = {
    **{(each.__module__, each.__name__): each for each in _CLASSES},
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,  # Python 3.13
}
"""(module, name) -> what a metadata file may use. dtypes are allowed too."""


class _MetadataUnpickler(pickle._Unpickler):
    """In Python, because the one in C lets a file set attributes of the classes that it names."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it changes a class; nothing of it was run")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not data; nothing of it was run")


def read_metadata(file: Path) -> Metadata:
    """Read a metadata file without running anything that it names.

    Raises: ValueError for a file that names other things than data, that is damaged, or that points outside of its
    folder; OSError if it cannot be read.
    """
    try:
        with file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        names = {info.relative_path for info in metadata.storage_data.values()}
        outside = sorted(name for name in names if Path(name).name != name)
        is_sound = isinstance(metadata, Metadata) and all(isinstance(n, str) for n in metadata.state_dict_metadata)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{METADATA_FILE}: {str(error) or type(error).__name__}") from error
    if not is_sound:
        raise ValueError(f"{METADATA_FILE}: it is not the metadata of a checkpoint")
    if outside:
        raise ValueError(f"{METADATA_FILE}: it points to {outside[0]}, outside of the checkpoint")
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    return metadata
