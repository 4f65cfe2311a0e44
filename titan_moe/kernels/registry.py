"""The list of operations that tests and benchmarks walk."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, TypeAlias

from torch import Tensor

Output: TypeAlias = Tensor | tuple[Tensor, ...]
"""An operation returns one tensor or several."""


@dataclass(frozen=True)
class Sample:
    """Arguments of an operation, and the number of leading ones that are differentiable (0: no backward)."""

    name: str
    args: tuple[Any, ...]
    num_differentiable: int


@dataclass(frozen=True)
class Kernel:
    """An operation and its reference in plain PyTorch. The tests hold the inputs on which both must agree."""

    name: str
    op: Callable[..., Output]
    reference: Callable[..., Output]
    needs_triton: bool = False
    """Whether it runs only on GPUs, and in fp32 in Triton's interpreter."""


KERNELS: dict[str, Kernel] = {}


def register(kernel: Kernel) -> None:
    """Add an operation to the list.

    Raises: ValueError for a name that is registered already.
    """
    if kernel.name in KERNELS:
        raise ValueError(f"kernel {kernel.name!r} is registered already; each kernel needs its own name")
    KERNELS[kernel.name] = kernel


def load_all() -> dict[str, Kernel]:
    """Import every kernel file, which registers its operations, and return the list."""
    for module in walk_packages([str(Path(__file__).parent)], "titan_moe.kernels."):
        import_module(module.name)
    return KERNELS
