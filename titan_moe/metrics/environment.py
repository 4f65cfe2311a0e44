"""Record the software and hardware of a run, so that its numbers can be explained later."""

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from titan_moe.metrics.whole_file import write_whole

PACKAGES = ("titan_moe", "torch", "triton", "torchtitan", "torchao")


def write_environment(run_folder: Path) -> dict[str, Any]:
    """Write `environment.json` into the run folder and return its content. Call it on rank 0. It has no host name and
    no user name, because run folders are published."""
    environment = describe_environment()
    run_folder.mkdir(parents=True, exist_ok=True)
    write_whole(run_folder / "environment.json", json.dumps(environment, indent=2) + "\n")
    return environment


def describe_environment() -> dict[str, Any]:
    """Versions, devices of this host, settings of PyTorch's allocator of GPU memory, the package's commit and the
    command; null for what is missing."""
    has_cuda = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if has_cuda else []
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "cuda": torch.version.cuda if has_cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,
        "system": f"{platform.system()} {platform.machine()}",
        "num_cpus": os.cpu_count(),
        "devices": dict(Counter(names)),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "git": git_state(Path(__file__).parents[1]),
        "argv": sys.argv,
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """The git commit of a folder, and whether tracked files have changed since. The folder's `__init__.py` must be
    tracked: None for an installed package, also inside the checkout of another project."""
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        is_dirty = bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
        return {"commit": _git(folder, "rev-parse", "HEAD"), "is_dirty": is_dirty}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _version(package: str) -> str | None:
    if package == "torch":
        return str(torch.__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
