"""Checkpoint folders: only complete ones count, and a removal starts with the metadata file."""

import errno
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
    make(folders, "7-copy", "007")
    assert folders.complete_steps() == [3, 20, 100]
    assert folders.remove_incomplete() == [101]
    assert folders.path("7-copy").exists() and folders.path("007").exists() and not folders.path(101).exists()
    assert folders.keep_newest(2) == [3]
    assert folders.complete_steps() == [20, 100]


def test_folders_saved_since_the_last_update_are_counted_for_themselves(tmp_path):
    folders = CheckpointFolders(tmp_path)
    make(folders, 1, 2, 3, 4, 5, 6)
    assert folders.keep_newest(2, last_update=3) == [1, 4]
    assert folders.complete_steps() == [2, 3, 5, 6]
    assert folders.keep_newest(2, last_update=6) == [2, 3], "an update has followed"


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


def test_folders_that_the_storage_keeps_do_not_end_a_run(tmp_path, monkeypatch, caplog):
    folders = CheckpointFolders(tmp_path)
    make(folders, 1, 2, 3)

    def refuse(path):  # as a network file system does while another process reads a file
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        assert folders.keep_newest(2) == [] and folders.remove_incomplete() == []
    assert folders.complete_steps() == [2, 3] and folders.path(1).exists()
    assert caplog.text.count("step-1 cannot be removed") == 2
    assert folders.remove_incomplete() == [1] and not folders.path(1).exists()


def test_folders_that_are_links_leave_what_they_point_to(tmp_path):
    folders, elsewhere = CheckpointFolders(tmp_path / "checkpoints"), CheckpointFolders(tmp_path / "elsewhere")
    make(folders, 2)
    make(elsewhere, 1)
    folders.path(1).symlink_to(elsewhere.path(1))
    assert folders.complete_steps() == [1, 2]
    assert folders.keep_newest(1) == [1]
    assert folders.complete_steps() == [2] and elsewhere.complete_steps() == [1]
    assert (elsewhere.path(1) / "data").exists()
