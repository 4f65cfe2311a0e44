"""The first import of torchtitan: the right version, a device that exists, and a log of its own."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from types import ModuleType, SimpleNamespace
from typing import Any

OLDEST = (0, 2, 2)
TOO_NEW = (0, 3)


def import_torchtitan(module: str = "") -> ModuleType:
    """Import `torchtitan.<module>`; the first call also checks the version, adapts the host and quiets the log.

    Raises: ImportError naming what is missing and the command that installs it.
    """
    name = f"torchtitan.{module}" if module else "torchtitan"
    if "torchtitan" in sys.modules:
        return import_module(name)
    check_version()
    try:
        with _cpu_as_device():
            import_module("torchtitan.tools.utils")
        _give_own_logger()
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "torchtitan":
            raise
        raise ImportError(
            f"torchtitan needs the package {error.name!r}, which is not installed (it needs triton on CPU hosts too); "
            "install titan_moe with its dependencies: pip install -e ."
        ) from error


def check_version() -> None:
    """Refuse a torchtitan that this code was not written against: its recipes and classes change between minors."""
    wanted = "titan_moe needs torchtitan>=0.2.2,<0.3: pip install 'torchtitan>=0.2.2,<0.3'"
    try:
        found = metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        raise ImportError(f"torchtitan is not installed; {wanted}") from None
    if not OLDEST <= _release(found) < TOO_NEW:
        raise ImportError(f"torchtitan {found} is installed; {wanted}")


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: '0.2.2.dev1+cpu' → (0, 2, 2)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


@contextmanager
def _cpu_as_device() -> Iterator[None]:
    """On a host without an accelerator, let torchtitan see the CPU; it would take CUDA for granted.

    It asks two functions of torch once, while it is imported, and keeps the answers: they are replaced for just so
    long, and torch stays as it was.
    """
    import torch._utils as torch_utils

    if torch_utils._get_available_device_type() is not None:
        yield
        return
    device_type, device_module = torch_utils._get_available_device_type, torch_utils._get_device_module
    torch_utils._get_available_device_type = lambda: "cpu"
    torch_utils._get_device_module = lambda name: _CpuModule() if name == "cpu" else device_module(name)
    try:
        yield
    finally:
        torch_utils._get_available_device_type = device_type
        torch_utils._get_device_module = device_module


class _CpuModule(ModuleType):
    """`torch.cpu` with the memory questions that `torch.cuda` answers: the process's peak stands for allocations."""

    def __init__(self) -> None:
        super().__init__("torch.cpu")

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(name="CPU", total_memory=total_bytes)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"active_bytes.all.peak": peak_bytes, "reserved_bytes.all.peak": peak_bytes}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def _give_own_logger() -> None:
    """Move torchtitan's messages from the root logger to one called "torchtitan", which shows warnings and worse.

    `logging.getLogger("torchtitan").setLevel("INFO")` brings the rest back.
    """
    root, own = logging.getLogger(), logging.getLogger("torchtitan")
    if own.level == logging.NOTSET:
        own.setLevel(logging.WARNING)
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and getattr(module, "logger", None) is root:
            module.logger = own  # type: ignore[attr-defined]
