"""Guard the import of torchtitan: check its version, set a device type, separate its logger, compile later."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from titan_moe.versions import release

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
        with _compiled_at_first_call():
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
    if not MIN_VERSION <= release(version) < BELOW_VERSION:
        raise ImportError(f"torchtitan {version} is installed; {requirement}")


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


@contextmanager
def _compiled_at_first_call() -> Iterator[None]:
    """Postpone `torch.compile` of functions that a module compiles when it is imported, as torchtitan's attention does:
    with its options it imports Inductor, a third of the time in which a run without graphs starts."""
    import torch

    compile_now = torch.compile

    def compile_later(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled = cache(lambda: compile_now(function, **options))

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_traced = torch.compiler.is_compiling()  # then it is a part of that graph
            return (function if is_traced else compiled())(*args, **kwargs)

        return call

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = compile_now


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
