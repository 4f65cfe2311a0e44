"""Add a gradient to a total of another dtype, in the total's, in one pass over memory.

Physics: memory-bound. A bf16 gradient and an fp32 total move 2 + 4 + 4 = 10 bytes an element. The first gradient of a
step overwrites a total that nobody zeroes and nobody reads: 2 + 4 = 6. PyTorch's `add_` makes no wide accesses where
dtypes differ: 1.75 TB/s on an H200, 96 of the 2577 ms of a step of Mixtral-8x7B over 8 of them with 4 microbatches; its
`copy_` to another dtype moves 2.5. Here a warp touches whole lines, a thread has 48 bytes under way, and weights fill
tens of thousands of programs. Measured, of 46 to 117 million elements: 2.6 TB/s, where PyTorch's adds reach 1.6. AdamW
moves 4 on the same tensors.

Nothing is rounded on the way: a bf16 number is an fp32 one, and the sum is rounded once, to PyTorch's bits.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.registry import Benchmark, Kernel, Sample, Tunable, register

BLOCK = 2048
Accumulate = Callable[[Tensor, Tensor, bool], Tensor]
"""Total, addend, whether it is the first -> the total, which has changed."""


def accumulate_reference(total: Tensor, addend: Tensor, is_first: bool = False) -> Tensor:
    """The definition; returns the total."""
    return total.copy_(addend) if is_first else total.add_(addend)


@triton.jit
def _accumulate_kernel(total_ptr, addend_ptr, num_elements, IS_FIRST: tl.constexpr, BLOCK: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = element < num_elements
    # a thread takes four neighbours of either tensor, 16 bytes and 8: of eight it would have to give some away to store
    value = tl.load(addend_ptr + tl.max_contiguous(element, 4), mask=keep, other=0.0).to(tl.float32)
    if not IS_FIRST:
        value += tl.load(total_ptr + element, mask=keep, other=0.0)
    tl.store(total_ptr + element, value, mask=keep)


def launch_accumulate(total: Tensor, addend: Tensor, is_first: bool = False) -> None:
    """The reference in Triton: an fp32 total, an addend of its shape in fp32 or bf16, both contiguous."""
    num_elements = total.numel()
    if num_elements:
        _accumulate_kernel[(triton.cdiv(num_elements, BLOCK),)](
            total, addend, num_elements, IS_FIRST=is_first, BLOCK=BLOCK, num_warps=8
        )


@torch.library.custom_op("titan_moe::accumulate", mutates_args=("total",))
def _accumulate(total: Tensor, addend: Tensor, is_first: bool) -> None:
    if total.shape != addend.shape:
        raise ValueError(f"a total of shape {list(total.shape)} takes no addend of shape {list(addend.shape)}")
    is_mixed = total.dtype == torch.float32 and addend.dtype == torch.bfloat16
    if total.is_cuda and is_mixed and total.is_contiguous() and addend.is_contiguous():
        launch_accumulate(total, addend, is_first)
    else:
        accumulate_reference(total, addend, is_first)


_accumulate.register_fake(lambda total, addend, is_first: None)


def accumulate(total: Tensor, addend: Tensor, is_first: bool = False) -> Tensor:
    """Add to a total of the same shape, in its dtype; with `is_first` overwrite it, whatever it holds.

    In Triton if bf16 comes to fp32 on a GPU and both are contiguous. All else is PyTorch's, a transposed addend too;
    the bits are the same.
    """
    _accumulate(total, addend, is_first)
    return total


IMPLEMENTATIONS: dict[str, Accumulate] = {"torch": accumulate_reference, "triton": accumulate}
"""`Kernels.gradients` -> what adds."""


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    def sample(name: str, *shape: int, is_first: bool = False) -> Sample:
        total = torch.full(shape, torch.nan, device=device) if is_first else torch.randn(shape, device=device)
        return Sample(name, (total, torch.randn(shape, device=device, dtype=dtype), is_first), 0)

    shapes = {"odd": (3, 5, 7), "empty": (0, 4), "scalar": (), "blocks": (2, BLOCK), "one_more": (BLOCK + 1,)}
    samples = [sample(name, *shape) for name, shape in shapes.items()]
    samples += [sample(f"{name}_first", *shape, is_first=True) for name, shape in shapes.items()]
    for is_first in (False, True):
        total, addend, _ = sample("strided", 33, 5, is_first=is_first).args
        samples.append(Sample(f"strided_{is_first}", (total, addend.reshape(5, 33).T, is_first), 0))
    return samples


def _overwriting_and_adding(add: Accumulate) -> Callable[[Tensor, Tensor], Tensor]:
    """What a step of two microbatches does."""

    def op(total: Tensor, addend: Tensor) -> Tensor:
        add(total, addend, True)
        return add(total, addend, False)

    return op


def _draw(shape: Mapping[str, Any], device: torch.device) -> Sample:
    addend = torch.randn(shape["elements"], device=device, dtype=torch.bfloat16)
    return Sample("", (torch.empty(shape["elements"], device=device), addend), 0)


def _eager(op: Callable[..., Any], shape: Mapping[str, Any]) -> Callable[..., Any]:
    """Autograd calls it, outside of every graph."""
    return op


def _benchmark(name: str, bytes_moved: int, is_first: bool) -> Benchmark:
    """On gate and up of the one expert of Mixtral-8x7B that each of eight ranks holds."""
    shape = (1, 2, 14_336, 4096)

    def draw(device: torch.device) -> Sample:
        addend = torch.randn(shape, device=device, dtype=torch.bfloat16)
        return Sample(name, (torch.randn(shape, device=device), addend, is_first), 0)

    moved = bytes_moved * 2 * 14_336 * 4096
    return Benchmark(name, draw, 0, 0, moved, moved)


register(
    Kernel(
        "accumulate",
        accumulate,
        accumulate_reference,
        _samples,
        benchmarks=(_benchmark("mixtral_ep8", 10, False), _benchmark("mixtral_ep8_first", 6, True)),
        baselines={"torch": accumulate_reference},
        tunable=Tunable(
            "gradients",
            {backend: _overwriting_and_adding(add) for backend, add in IMPLEMENTATIONS.items()},
            _draw,
            _eager,
        ),
    )
)
