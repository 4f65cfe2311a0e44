"""The environment of a run: versions and devices, without host and user names."""

import json
import platform
import socket
import subprocess

import torch

from titan_moe.metrics.environment import git_state, write_environment


def test_environment_file(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    environment = write_environment(tmp_path / "run")
    text = (tmp_path / "run" / "environment.json").read_text()
    assert json.loads(text) == environment
    assert environment["torch"] == torch.__version__ and environment["python"] == platform.python_version()
    assert environment["torchtitan"].startswith("0.2") and environment["world_size"] == 8
    assert isinstance(environment["devices"], dict) and environment["allocator"] == "expandable_segments:True"
    assert f'"{socket.gethostname()}"' not in text


def git(folder, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_git_state(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert git_state(package) is None
    git(tmp_path, "init")
    assert git_state(package) is None  # the surrounding repository does not track it
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-m", "x")
    state = git_state(package)
    assert len(state["commit"]) == 40 and not state["is_dirty"]
    (package / "__init__.py").write_text("changed")
    assert git_state(package) == state | {"is_dirty": True}
