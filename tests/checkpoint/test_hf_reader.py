"""Tensors on disk in another layout than ours, and in MXFP4, are read slice by slice."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from titan_moe.checkpoint import hf_reader
from titan_moe.checkpoint.hf_folder import HuggingFaceFolder, read_folder
from titan_moe.checkpoint.hf_names.names import Fused, NotOnDisk, Piece, pieces
from titan_moe.checkpoint.hf_weights import box_of
from titan_moe.checkpoint.storage import ChunkedTensor, load_slices
from titan_moe.config.model import ModelConfig
from titan_moe.parameters import Chunk

safetensors = pytest.importorskip("safetensors.torch")
EXPERTS, HIDDEN, WIDTH = 5, 7, 96
ROWS = {
    "gpt_oss": (Fused("w", "e2FL", ("e", "L", "F2"), in_mxfp4=("e", "F2", "L")), (EXPERTS, 2, HIDDEN, WIDTH)),
    "llama4": (Fused("w", "e2FL", ("e", "L", "2F")), (EXPERTS, 2, HIDDEN, WIDTH)),
    "granite": (Fused("w", "e2FL", ("e", "2F", "L")), (EXPERTS, 2, HIDDEN, WIDTH)),
    "down": (Fused("w", "eLF", ("e", "F", "L"), in_mxfp4=("e", "L", "F")), (EXPERTS, HIDDEN, WIDTH)),
    "bias": (Fused("w", "e2F", ("e", "F2")), (EXPERTS, 2, HIDDEN)),
}


def on_disk(row: str, ours: Tensor) -> Tensor:
    """By the shapes of each family's own code."""
    gate_and_up = {
        "gpt_oss": lambda: torch.stack([ours[:, 0], ours[:, 1]], dim=2).flatten(1, 2).mT,
        "llama4": lambda: torch.cat([ours[:, 0], ours[:, 1]], dim=1).mT,
        "granite": lambda: torch.cat([ours[:, 0], ours[:, 1]], dim=1),
        "down": lambda: ours.mT,
        "bias": lambda: torch.stack([ours[:, 0], ours[:, 1]], dim=2).flatten(1),
    }
    return gate_and_up[row]().contiguous()


def folder_of(path: Path, tensors: dict[str, Tensor]) -> HuggingFaceFolder:
    safetensors.save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({}))
    return read_folder(path)


def read(source: HuggingFaceFolder, piece: Piece, chunk: Chunk) -> None:
    (box,) = box_of(chunk, piece)
    load_slices({piece.name: ChunkedTensor(piece.view, [box])}, hf_reader.reader_of(source, [piece]))


def piece_of(row: str) -> Piece:
    own, shape = ROWS[row]
    (piece,) = pieces({"x": own, "y": NotOnDisk()}, ModelConfig(), {"x": shape, "y": (1,)})
    return piece


@pytest.mark.parametrize("row", ROWS)
def test_any_box_of_a_fused_tensor_is_read(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_reader, "MAX_READ_BYTES", 4 * 2 * HIDDEN * WIDTH * 2)
    ours, piece = torch.randn(ROWS[row][1]), piece_of(row)
    stored = on_disk(row, ours)
    assert piece.shape == stored.shape
    source = folder_of(tmp_path, {"w": stored})
    for place in ((slice(1, 4),), (slice(0, 5), ..., slice(2, 6)), (slice(2, 3), slice(1, 2))):
        wanted = ours[place]
        first = torch.arange(ours.numel()).view(ours.shape)[place].flatten()[0]
        offsets = tuple(int(index) for index in torch.unravel_index(first, ours.shape))
        values = torch.full(wanted.shape, torch.nan)
        read(source, piece, Chunk(values, offsets))
        assert torch.equal(values, wanted)


@pytest.mark.parametrize("row", ["gpt_oss", "down"])
def test_mxfp4_is_what_transformers_makes_of_it(row: str, tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    piece = piece_of(row).in_mxfp4
    assert piece is not None and piece.scales is not None
    blocks = torch.randint(256, piece.shape, dtype=torch.uint8)
    scales = torch.randint(100, 150, piece.shape[:-1], dtype=torch.uint8)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # as on disk without MXFP4
    source = folder_of(tmp_path, {piece.name: blocks, piece.scales: scales})
    values = torch.full(ROWS[row][1], torch.nan)
    read(source, piece, Chunk(values, (0,) * values.ndim))
    assert torch.equal(on_disk(row, values), expected)
    part = torch.full((2, *values.shape[1:-1], 41), torch.nan)
    read(source, piece, Chunk(part, (3, *(0 for _ in part.shape[2:]), 17)))
    assert torch.equal(part, values[3:, ..., 17:58])
