"""The manifest: complete or absent, and refused after any change of a byte."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from titan_moe.checkpoint import manifest
from titan_moe.checkpoint.manifest import FORMAT, MANIFEST_FILE, FileHash, Manifest, find_damage, read_manifest

WRITTEN = Manifest({"model.moe.top_k": 2, "optim.lr": 0.1, "run.folder": 'a "b" ü'}, "7 tokens", {})


def test_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    written = Manifest(WRITTEN.recipe, WRITTEN.data, {"__0_0.distcp": FileHash(3, "ab")})
    written.write(tmp_path)
    assert read_manifest(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_FILE]


def test_manifest_with_any_flipped_bit_is_refused(tmp_path: Path) -> None:
    WRITTEN.write(tmp_path)
    file = tmp_path / MANIFEST_FILE
    whole = file.read_bytes()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        with pytest.raises(ValueError, match="manifest.json is not as it was written"):
            read_manifest(tmp_path)


@pytest.mark.parametrize("data", [b"", b"[1]", b"null", b"[" * 100_000, b"\xff\xfe", b'{"sha256": 1}'])
def test_manifest_that_is_none_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / MANIFEST_FILE).write_bytes(data)
    with pytest.raises(ValueError, match="manifest.json is not as it was written"):
        read_manifest(tmp_path)


def test_manifest_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT", FORMAT + 1)
    WRITTEN.write(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"has the format {FORMAT + 1}, but this version reads {FORMAT}"):
        read_manifest(tmp_path)


def test_manifest_without_a_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).write_bytes(manifest._seal({"format": FORMAT, "recipe": {}}))
    with pytest.raises(ValueError, match="manifest.json lacks a part"):
        read_manifest(tmp_path)


def test_manifest_hash_is_that_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(100_000))
    said = subprocess.run(["sha256sum", tmp_path / "a"], capture_output=True, text=True, check=True).stdout
    assert find_damage(tmp_path, [("a", FileHash(100_000, said.split()[0]))]) == []
    assert find_damage(tmp_path, [("a", FileHash(1, "")), ("a", FileHash(100_000, "")), ("b", FileHash(1, ""))]) == [
        "a has 100,000 bytes instead of 1",
        "a is not as it was written, its sha256 differs",
        "b cannot be read: No such file or directory",
    ]


@pytest.mark.usefixtures("ends_soon")
def test_manifest_may_name_what_never_ends(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert find_damage(tmp_path, [("pipe", FileHash(0, "")), ("zero", FileHash(0, ""))]) == [
        "pipe cannot be read: it is no regular file",
        "zero cannot be read: it is no regular file",
    ]
    (tmp_path / MANIFEST_FILE).symlink_to("pipe")
    with pytest.raises(OSError, match="it is no regular file"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/dev/zero", "a/b"])
def test_manifest_cannot_point_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    Manifest(WRITTEN.recipe, WRITTEN.data, {name: FileHash(0, "")}).write(tmp_path)
    with pytest.raises(ValueError, match="outside of the checkpoint"):
        read_manifest(tmp_path)


def test_manifest_is_json(tmp_path: Path) -> None:
    WRITTEN.write(tmp_path)
    contents = json.loads((tmp_path / MANIFEST_FILE).read_text())
    assert list(contents) == ["format", "recipe", "data", "files", "validation_loss", "base", "sha256"]
