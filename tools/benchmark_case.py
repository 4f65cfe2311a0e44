"""What a benchmark of an operation consists of."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from titan_moe.kernels.registry import Sample

Draw = Callable[[torch.device], Sample]
Ops = dict[str, Callable[..., Any]]


class Case(NamedTuple):
    """A timed call: full-size inputs, and the least FLOPs and bytes of forward and of both directions."""

    draw: Draw
    forward_flops: float
    total_flops: float
    forward_bytes: float
    total_bytes: float


class Benchmark(NamedTuple):
    """An operation's cases, and its implementations, ours first."""

    cases: dict[str, Case]
    ops: Ops
