"""The list of operations that tests and `titan-moe tune` walk."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, TypeAlias

import torch
from torch import Tensor

Output: TypeAlias = Tensor | tuple[Tensor, ...]
"""An operation returns one tensor or several."""


@dataclass(frozen=True)
class Sample:
    """Arguments of an operation, and the number of leading ones that are differentiable (0: no backward)."""

    name: str
    args: tuple[Any, ...]
    num_differentiable: int


def as_one_graph(op: Callable[..., Any], shape: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile an operation alone, without graph breaks."""
    return torch.compile(op, fullgraph=True)


@dataclass(frozen=True)
class Tunable:
    """An operation whose implementation a recipe chooses, as runs call it; `titan-moe tune` times it.

    Every candidate takes the arguments of a drawn sample and returns all tensors that a run uses: the compiler removes
    outputs that are not used.
    """

    operation: str
    """A field of `config.kernels.Kernels`."""
    candidates: Mapping[str, Callable[..., Any]]
    """Value of that field -> implementation, without slow references."""
    draw: Callable[[Mapping[str, Any], torch.device], Sample]
    """Draw random bf16 arguments for a shape of `plan.kernel_shapes`."""
    compiled: Callable[[Callable[..., Any], Mapping[str, Any]], Callable[..., Any]] = as_one_graph
    """Candidate, shape -> the candidate as compiled runs call it."""


@dataclass(frozen=True)
class Kernel:
    """An operation and its reference in plain PyTorch. The tests hold the inputs on which both must agree."""

    name: str
    op: Callable[..., Output]
    reference: Callable[..., Output]
    needs_triton: bool = False
    """Whether it runs only on GPUs, and in fp32 in Triton's interpreter."""
    tunable: Tunable | None = None
    """How `titan-moe tune` measures the operation, if a recipe chooses its implementation."""


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
