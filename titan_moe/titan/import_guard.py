"""Guard the first import of torchtitan: check its version, set an existing device type, separate its logger."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from itertools import takewhile
from types import ModuleType

MIN_VERSION = (0, 2, 2)
BELOW_VERSION = (0, 3)


def import_torchtitan(module: str = "") -> ModuleType:
    """Import `torchtitan.<module>`. The first call also checks the version, sets the device type and the logger.

    Raises: ImportError naming the missing package and the command that installs it.
    """
    name = f"torchtitan.{module}" if module else "torchtitan"
    if "torchtitan" in sys.modules:
        return import_module(name)
    check_version()
    try:
        with _cpu_as_device():
            import_module("torchtitan.tools.utils")
        _separate_logger()
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "torchtitan":
            raise
        raise ImportError(
            f"torchtitan needs the package {error.name!r}, which is not installed (it needs triton on CPU hosts too); "
            "install titan_moe with its dependencies: pip install -e ."
        ) from error


def check_version() -> None:
    """Refuse an unsupported torchtitan. Its configuration and classes change between minor versions.

    Raises: ImportError for a missing or unsupported version.
    """
    requirement = "titan_moe needs torchtitan>=0.2.2,<0.3: pip install 'torchtitan>=0.2.2,<0.3'"
    try:
        version = metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        raise ImportError(f"torchtitan is not installed; {requirement}") from None
    if not MIN_VERSION <= _release(version) < BELOW_VERSION:
        raise ImportError(f"torchtitan {version} is installed; {requirement}")


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: '0.2.2.dev1+cpu' → (0, 2, 2)."""
    return tuple(int(part) for part in takewhile(str.isdigit, version.split("+")[0].split(".")))


@contextmanager
def _cpu_as_device() -> Iterator[None]:
    """On a host without an accelerator, make torchtitan use the CPU. It would assume CUDA. torchtitan reads the device
    type from a function of torch once, during its import. This function is replaced only for the time of the import."""
    import torch._utils as torch_utils

    device_type = torch_utils._get_available_device_type
    if device_type() is None:
        torch_utils._get_available_device_type = lambda: "cpu"
    try:
        yield
    finally:
        torch_utils._get_available_device_type = device_type


def _separate_logger() -> None:
    """Move torchtitan's messages from the root logger to the logger "torchtitan", with level WARNING.

    `logging.getLogger("torchtitan").setLevel("INFO")` shows all of them.
    """
    root, own = logging.getLogger(), logging.getLogger("torchtitan")
    if own.level == logging.NOTSET:
        own.setLevel(logging.WARNING)
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and getattr(module, "logger", None) is root:
            module.logger = own  # type: ignore[attr-defined]
