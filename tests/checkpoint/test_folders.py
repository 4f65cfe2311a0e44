"""Checkpoint folders: only complete ones count, and a removal starts with the metadata file."""

import shutil

from titan_moe.checkpoint.folders import METADATA_FILE, CheckpointFolders


def make(folders, *steps, is_complete=True):
    for step in steps:
        folders.path(step).mkdir(parents=True)
        (folders.path(step) / "data").write_text("x")
        if is_complete:
            (folders.path(step) / METADATA_FILE).write_text("x")


def test_folders_without_metadata_are_incomplete(tmp_path):
    folders = CheckpointFolders(tmp_path / "checkpoints")
    assert folders.complete_steps() == [] and folders.remove_incomplete() == []
    make(folders, 100, 20, 3)
    make(folders, 101, is_complete=False)
    make(folders, "7-copy")
    assert folders.complete_steps() == [3, 20, 100]
    assert folders.remove_incomplete() == [101]
    assert folders.path("7-copy").exists() and not folders.path(101).exists()
    assert folders.keep_newest(2) == [3]
    assert folders.complete_steps() == [20, 100]


def test_folders_interrupted_removal_leaves_no_checkpoint(tmp_path, monkeypatch):
    folders = CheckpointFolders(tmp_path)
    make(folders, 1, 2)

    def die(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)
    try:
        folders.keep_newest(1)
    except KeyboardInterrupt:
        pass
    assert (folders.path(1) / "data").exists()
    assert folders.complete_steps() == [2]
