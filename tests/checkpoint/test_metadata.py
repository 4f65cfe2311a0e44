"""Metadata files are read without running what they name."""

import os
import pickle
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorProperties

from titan_moe.checkpoint.metadata import read_metadata


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


def test_metadata_cannot_change_a_class(tmp_path: Path) -> None:
    module, name = b"torch.distributed.checkpoint.metadata", b"MetadataIndex"
    named = b"\x8c" + bytes([len(module)]) + module + b"\x8c" + bytes([len(name)]) + name + b"\x93"
    state = b"N}\x8c\x08__hash__Ns\x86"  # (None, {"__hash__": None})
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + named + state + b"b.")
    before = MetadataIndex.__hash__
    with pytest.raises(ValueError, match="it changes a class"):
        read_metadata(tmp_path / ".metadata")
    assert MetadataIndex.__hash__ is before
