"""Metadata files are read without running what they name."""

import os
import pickle
from functools import partial
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)

from titan_moe.checkpoint.metadata import read_metadata
from titan_moe.checkpoint.storage import load


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The metadata file of a small checkpoint with tensors of all dtypes that a run may save, and with values."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)
    state = {str(dtype): torch.zeros(2, 3, dtype=dtype) for dtype in (*dtypes, torch.float8_e4m3fn, torch.int32)}
    state["image"] = torch.zeros(1, 2, 2, 2).to(memory_format=torch.channels_last)
    dcp.save({"model": state, "values": {"step": 3, "order": "first", "betas": (0.9, None)}}, checkpoint_id=tmp_path)
    return tmp_path / ".metadata"


class Named:
    """Pickled, it is a call of a function."""

    def __init__(self, function, *args) -> None:
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_metadata_is_read_as_pickle_would(file: Path) -> None:
    found, expected = read_metadata(file), pickle.loads(file.read_bytes())
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert (found.storage_data, found.planner_data) == (expected.storage_data, expected.planner_data)
    assert str(found.storage_meta.checkpoint_id) == str(expected.storage_meta.checkpoint_id) == str(file.parent)


@pytest.mark.parametrize(
    ("crafted", "named"),
    [
        (lambda made: Named(os.system, f"touch {made}"), "posix.system"),
        (lambda made: Named(exec, f"open({str(made)!r}, 'w')"), "builtins.exec"),
        (lambda made: Named(getattr, PurePosixPath, "joinpath"), "builtins.getattr"),
        (lambda made: Named(torch.load, str(made)), "torch.serialization.load"),
        (lambda made: Metadata({}, storage_data={}, planner_data=Named(os.mkdir, str(made))), "posix.mkdir"),
        (lambda made: MetadataIndex(Named(os.mkdir, str(made))), "posix.mkdir"),  # type: ignore[arg-type]
        (lambda made: TensorProperties(Named(os.mkdir, str(made))), "posix.mkdir"),  # type: ignore[arg-type]
    ],
)
def test_metadata_that_names_a_function_is_refused(tmp_path: Path, crafted, named: str) -> None:
    file, made = tmp_path / ".metadata", tmp_path / "made"
    file.write_bytes(pickle.dumps(crafted(made)))
    with pytest.raises(ValueError, match=rf"^.metadata: it names {named}, which is not data; nothing of it was run"):
        read_metadata(file)
    assert not made.exists()


@pytest.mark.parametrize("name", ["Metadata.__init__", "Metadata.__init__.__globals__", "os.system", "torch"])
def test_metadata_cannot_reach_past_a_class(tmp_path: Path, name: str) -> None:
    module = b"torch.distributed.checkpoint.metadata"
    text = b"\x8c" + bytes([len(module)]) + module + b"\x8c" + bytes([len(name)]) + name.encode()
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + text + b"\x93.")
    with pytest.raises(ValueError, match="which is not data"):
        read_metadata(tmp_path / ".metadata")


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps([1]), pickle.dumps(StorageMeta())])
def test_metadata_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"^.metadata: \S"):
        read_metadata(tmp_path / ".metadata")


def test_metadata_cannot_point_outside_of_its_folder(file: Path) -> None:
    metadata = pickle.loads(file.read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"points to ../../secret, outside of the checkpoint"):
        read_metadata(file)


DCP = "torch.distributed.checkpoint.metadata"


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def fields_of(**fields: bytes) -> bytes:
    items = b"".join(text(name) + value for name, value in fields.items())
    return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS


FIELD = fields_of(x=pickle.NONE)
SLOTS = pickle.NONE + FIELD + pickle.TUPLE2  # a second dict, for attributes that are no fields
LAYOUT, FORMAT = named("torch.serialization", "_get_layout"), named(DCP, "_MEM_FORMAT_ENCODING")
STRIDED = LAYOUT + text("torch.strided") + pickle.TUPLE1 + pickle.REDUCE
MEMBER = FORMAT + pickle.BININT1 + b"\0" + pickle.TUPLE1 + pickle.REDUCE
INDEX = named(DCP, "MetadataIndex") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
SIZE = named("torch", "Size") + pickle.EMPTY_TUPLE + pickle.REDUCE
NESTED = text("") + (pickle.MEMOIZE + pickle.BINGET + b"%c" + pickle.TUPLE2) * 60 % tuple(range(60))


CRAFTED = {
    "fields of a function": (LAYOUT + FIELD + pickle.BUILD, "changes _get_layout"),
    "attributes of a function": (LAYOUT + SLOTS + pickle.BUILD, "changes _get_layout"),
    "our own function": (named("pathlib", "PosixPath") + FIELD + pickle.BUILD, "changes _path"),
    "member of an enum": (MEMBER + fields_of(_value_=pickle.NONE) + pickle.BUILD, "changes _MEM_FORMAT_ENCODING"),
    "slots of a member": (MEMBER + SLOTS + pickle.BUILD, "changes _MEM_FORMAT_ENCODING"),
    "class": (named(DCP, "MetadataIndex") + SLOTS + pickle.BUILD, "changes MetadataIndex"),
    "enum": (FORMAT + SLOTS + pickle.BUILD, "changes _MEM_FORMAT_ENCODING"),
    "dtype": (named("torch", "float32") + FIELD + pickle.BUILD, "changes dtype"),
    "layout": (STRIDED + FIELD + pickle.BUILD, "changes layout"),
    "size": (SIZE + FIELD + pickle.BUILD, "changes Size"),
    "dict": (FIELD + FIELD + pickle.BUILD, "changes dict"),
    "slots of a record": (INDEX + SLOTS + pickle.BUILD, "MetadataIndex in more than its fields"),
    "method of a record": (INDEX + fields_of(__reduce__=LAYOUT) + pickle.BUILD, "in more than its fields"),
    "class of a record": (INDEX + fields_of(__class__=FORMAT) + pickle.BUILD, "in more than its fields"),
    "call of a record": (named(DCP, "MetadataIndex") + text("a") + pickle.TUPLE1 + pickle.REDUCE, "calls Metadata"),
    "call of a dtype": (named("torch", "float32") + pickle.EMPTY_TUPLE + pickle.REDUCE, "calls dtype"),
    "call of an instance": (INDEX + pickle.EMPTY_TUPLE + pickle.REDUCE, "calls MetadataIndex"),
    "call of a member": (MEMBER + pickle.EMPTY_TUPLE + pickle.REDUCE, "calls _MEM_FORMAT_ENCODING"),
    "instance with arguments": (named(DCP, "StorageMeta") + text("a") + pickle.TUPLE1 + pickle.NEWOBJ, "StorageMeta"),
    "instance of an enum": (FORMAT + pickle.EMPTY_TUPLE + pickle.NEWOBJ, "an instance of _MEM_FORMAT_ENCODING"),
    "instance of a function": (LAYOUT + pickle.EMPTY_TUPLE + pickle.NEWOBJ, "an instance of _get_layout"),
    "keywords": (named(DCP, "StorageMeta") + pickle.EMPTY_TUPLE + FIELD + pickle.NEWOBJ_EX, "an instruction"),
    "call by its name": (b"(" + b"S'a'\ni" + DCP.encode() + b"\nMetadataIndex\n", "an instruction"),
    "call by its object": (b"(" + named(DCP, "MetadataIndex") + text("a") + pickle.OBJ, "an instruction"),
    "extension": (pickle.EXT1 + b"\1", "an instruction"),
    "persistent id": (text("a") + pickle.BINPERSID, "an instruction"),
    "setting of no dict": (INDEX + text("a") + pickle.NONE + pickle.SETITEM, "a key that is no name"),
    "key that hashes for ever": (pickle.EMPTY_DICT + NESTED + pickle.NONE + pickle.SETITEM, "a key that is no name"),
}


@pytest.mark.parametrize(("crafted", "refusal"), CRAFTED.values(), ids=CRAFTED)
def test_metadata_neither_calls_nor_changes_what_it_names(tmp_path: Path, crafted: bytes, refusal: str) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.PROTO + b"\4" + crafted + pickle.STOP)
    with pytest.raises(ValueError, match=rf"^.metadata: it .*{refusal}.*nothing of it was run"):
        read_metadata(tmp_path / ".metadata")
    assert not hasattr(torch.serialization._get_layout, "x") and not hasattr(MetadataIndex, "x")
    assert [member.value for member in _MEM_FORMAT_ENCODING] == [0, 1, 2]
    assert not any(hasattr(member, "x") for member in _MEM_FORMAT_ENCODING)


@pytest.mark.usefixtures("ends_soon")
def test_metadata_and_tensors_are_regular_files(file: Path) -> None:
    tensors = next(file.parent.glob("*.distcp"))
    for path in (tensors, file):
        path.unlink()
        os.mkfifo(path)
        read = partial(load, {"model": {"torch.float32": torch.zeros(2, 3)}}, file.parent)
        with pytest.raises((OSError, CheckpointException), match="it is no regular file"):
            read() if path == tensors else read_metadata(path)
