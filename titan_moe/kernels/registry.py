"""The list of operations that tests and benchmarks walk."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeAlias

import torch
from torch import Tensor

Output: TypeAlias = Tensor | tuple[Tensor, ...]
"""What an operation returns: one tensor, or several."""


@dataclass(frozen=True)
class Sample:
    """One call of an operation: the arguments, and how many leading ones are differentiable (0: it has no backward)."""

    name: str
    args: tuple[Any, ...]
    num_differentiable: int


@dataclass(frozen=True)
class Benchmark:
    """A call worth timing: full-size bf16 inputs, and the work that forward, and both directions, cannot do without."""

    name: str
    draw: Callable[[torch.device], Sample]
    forward_flops: float
    total_flops: float
    forward_bytes: float
    total_bytes: float


def as_one_graph(op: Callable[..., Any], shape: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile an operation as part of a block's piece: no graph break, and nothing around it."""
    return torch.compile(op, fullgraph=True)


@dataclass(frozen=True)
class Tunable:
    """An operation whose implementation a recipe chooses, as runs call it: what `titan-moe tune` times.

    Every candidate takes the arguments of a drawn sample, and gives a tensor or a tuple of tensors, all of those that
    a run uses: what nobody uses, a compiler leaves out.
    """

    operation: str
    """A field of `config.kernels.Kernels`."""
    candidates: Mapping[str, Callable[..., Any]]
    """Value of that field -> implementation; a slow reference has no place here."""
    draw: Callable[[Mapping[str, Any], torch.device], Sample]
    """Makes random bf16 arguments for a shape of `plan.kernel_shapes`."""
    compiled: Callable[[Callable[..., Any], Mapping[str, Any]], Callable[..., Any]] = as_one_graph
    """A candidate, and the shape -> what runs that compile make of it."""


@dataclass(frozen=True)
class Kernel:
    """An operation, the plain PyTorch function that defines it, and inputs on which the two must agree.

    `samples(device, dtype)` draws fresh inputs. `valid(output, args)` selects the part of an output that the operation
    promises to write (slots past the last one are never written), `valid_grad` the same of the first input's gradient;
    None means all of it. An operation with several outputs promises all of each.
    """

    name: str
    op: Callable[..., Output]
    reference: Callable[..., Output]
    samples: Callable[[torch.device, torch.dtype], list[Sample]]
    valid: Callable[[Tensor, tuple[Any, ...]], Tensor] | None = None
    valid_grad: Callable[[Tensor, tuple[Any, ...]], Tensor] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    needs_triton: bool = False
    """Runs on GPUs, and in fp32 in Triton's interpreter; elsewhere the reference stands alone."""
    benchmarks: tuple[Benchmark, ...] = ()
    baselines: Mapping[str, Callable[..., Output]] = field(default_factory=dict)
    """Other ways to the same result, which a benchmark times beside the operation."""
    tunable: Tunable | None = None
    """How a recipe's choice of this operation is measured, if it has one."""


KERNELS: dict[str, Kernel] = {}


def register(kernel: Kernel) -> Kernel:
    """Add an operation to the list; a name may be taken once."""
    if kernel.name in KERNELS:
        raise ValueError(f"kernel {kernel.name!r} is registered already")
    KERNELS[kernel.name] = kernel
    return kernel


def as_tuple(output: Output) -> tuple[Tensor, ...]:
    """An operation's outputs, however many."""
    return output if isinstance(output, tuple) else (output,)


def load_all() -> dict[str, Kernel]:
    """Import every kernel file, so that its entry is in the list, and return the list."""
    package = Path(__file__).parent
    for module in iter_modules([str(package)]):
        import_module(f"titan_moe.kernels.{module.name}")
    return KERNELS
