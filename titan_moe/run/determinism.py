"""Deterministic mode: two runs of one recipe on one layout have the same bits, on CPUs and on GPUs.

The same means recipe, number of ranks, devices and versions of libraries. Why bits repeat:

* Seeds: initial weights follow from seed, name and expert; the order of data and stochastic rounding from seed and
  step.
* PyTorch's operations: those that have only a nondeterministic implementation raise an error with their name; others
  take the deterministic one. cuDNN's attention has none, so "auto" takes another backend.
* torch.compile: Inductor does not choose sizes of reductions by timing.
* Our kernels sum rows, slots, gradients and norms in a fixed order, without floating-point atomics. What atomics there
  are do not depend on order: maxima (scales of fp8 codes), and counters and signals of thread blocks.
* Collectives: dispatchers move rows and sum them in rank order. NCCL sums in the order of its rings and trees, which
  follow from topology and size; reductions inside the switch (NVLS) are off. Gloo's order is fixed.

Without this mode runs on a CPU repeat too. On a GPU then PyTorch's scatters, cuDNN's attention, Inductor's choices and
NVLS may differ.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from titan_moe.config import RecipeError

VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),  # cuBLAS reads it at its first use
    "NCCL_NVLS_ENABLE": ("0",),  # NCCL, when it makes a communicator
}
"""Environment variables -> the values that are deterministic; the first is set where there is none."""


@contextmanager
def determinism(is_on: bool) -> Iterator[None]:
    """Set the mode, before CUDA and NCCL are used; without it nothing is changed.

    Raises: RecipeError if a variable has a value that is not deterministic.
    """
    if not is_on:
        yield
        return
    import torch._inductor.config as inductor  # slow, and needed here alone

    problems = []
    for name, allowed in VARIABLES.items():
        value = os.environ.setdefault(name, allowed[0])
        if value not in allowed:
            values = " or ".join(allowed)
            problems.append(
                f"run.is_deterministic = true needs {name} = {values}, and the environment has {value}; unset it, or "
                "set is_deterministic = false"
            )
    if problems:
        raise RecipeError(problems)
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with inductor.patch(deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(was_on)
