"""The first import of torchtitan: the right version, a device that exists, and a log of its own."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from types import ModuleType

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

    It asks torch once, while it is imported, and keeps the answer: the question is replaced for just so long, and
    torch stays as it was.
    """
    import torch._utils as torch_utils

    if torch_utils._get_available_device_type() is not None:
        yield
        return
    device_type = torch_utils._get_available_device_type
    torch_utils._get_available_device_type = lambda: "cpu"
    try:
        yield
    finally:
        torch_utils._get_available_device_type = device_type


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
