"""Read the metadata file of torch.distributed.checkpoint. It is a pickle, and a pickle can name any function to call.

Only what such metadata consists of may be named here: the classes of DCP's description of tensors, dtypes, and sizes.
None of them does more than to hold values, and a file may neither call nor change them in another way than DCP does.
"""

import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from types import FunctionType
from typing import Any, ClassVar

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
from titan_moe.config.regular_file import open_regular

_RECORDS = (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
    TensorProperties,
    ChunkStorageMetadata,
    BytesStorageMetadata,
    StorageMeta,
    _StorageInfo,
)
"""Classes whose instances hold fields. A file makes an empty instance and then sets its fields; it calls none."""


def _path(*parts: str) -> str:
    """Stands for the class of a path, of which only the text is kept."""
    return str(PurePosixPath(*parts))


_CALLED: dict[tuple[str, str], Any] = {
    (_MEM_FORMAT_ENCODING.__module__, _MEM_FORMAT_ENCODING.__name__): _MEM_FORMAT_ENCODING,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,  # Python 3.13
}
"""(module, name) -> what a file may call: each returns a value and changes nothing."""
ALLOWED = {**{(each.__module__, each.__name__): each for each in _RECORDS}, **_CALLED}
"""(module, name) -> what a metadata file may use. dtypes are allowed too."""
_INSTRUCTIONS = """
    PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1
    BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST
    APPEND APPENDS EMPTY_DICT GLOBAL STACK_GLOBAL
""".split()
"""Instructions of a pickle that only hold values, or name one."""


class _MetadataUnpickler(pickle._Unpickler):
    """In Python, because the one in C lets a file call, and set attributes of, whatever it may name."""

    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not data; nothing of it was run")

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not any(function is allowed for allowed in _CALLED.values()):
            raise pickle.UnpicklingError(f"it calls {_name_of(function)}; nothing of it was run")
        self.stack.append(function(*arguments))

    def load_newobj(self) -> None:
        arguments, record = self.stack.pop(), self.stack.pop()
        if not any(record is allowed for allowed in _RECORDS) or arguments != ():
            raise pickle.UnpicklingError(f"it makes an instance of {_name_of(record)}; nothing of it was run")
        self.stack.append(object.__new__(record))

    def load_build(self) -> None:
        """Set the fields of a new record. A class, a function, a member of an enum are shared by the whole process."""
        state, record = self.stack.pop(), self.stack[-1]
        if type(record) not in _RECORDS:
            raise pickle.UnpicklingError(f"it changes {_name_of(record)}; nothing of it was run")
        if type(record) is TensorProperties and type(state) is tuple:
            record.__setstate__(state)
            return
        if type(state) is not dict or any(type(name) is not str or name.startswith("_") for name in state):
            raise pickle.UnpicklingError(
                f"it changes {_name_of(record)} in more than its fields; nothing of it was run"
            )
        vars(record).update(state)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())  # type: ignore[attr-defined]

    def _set_items(self, items: list[Any]) -> None:
        """Extend a dict. Of nested tuples a few bytes make a key whose hash takes for ever, so no key is one."""
        keys, values = items[::2], items[1::2]
        if type(self.stack[-1]) is not dict or not all(_is_plain_key(key) for key in keys):
            raise pickle.UnpicklingError("it has a key that is no name; nothing of it was run")
        self.stack[-1].update(zip(keys, values, strict=True))

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it has an instruction that no metadata needs; nothing of it was run")

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict.fromkeys(range(256), _refuse) | {
        **{getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _INSTRUCTIONS},
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _is_plain_key(key: Any) -> bool:
    if type(key) is not MetadataIndex:
        return type(key) is str
    parts = (getattr(key, name, None) for name in ("fqn", "offset", "index"))
    return all(part is None or type(part) in (str, int, torch.Size) for part in parts)


def _name_of(value: Any) -> str:
    """Name a class or a function, or the class of another value, for a refusal."""
    named = value if isinstance(value, (type, FunctionType)) else type(value)
    return str(getattr(named, "__qualname__", type(named).__name__))


def read_metadata(file: Path) -> Metadata:
    """Read a metadata file without running anything that it names.

    Raises: ValueError for a file that names other things than data, that is damaged, or that points outside of its
    folder; OSError if it cannot be read.
    """
    try:
        with open_regular(file) as stream:
            metadata = _MetadataUnpickler(stream).load()
        names = [info.relative_path for info in metadata.storage_data.values()]
        is_sound = type(metadata) is Metadata and all(type(n) is str for n in (*metadata.state_dict_metadata, *names))
        outside = sorted(name for name in names if Path(name).name != name) if is_sound else []
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
