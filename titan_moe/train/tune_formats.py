"""`titan-moe tune` of formats: GEMMs in the dtype of compute and in each native format, forward and backward.

All quantisation is inside the time: of rows, activations, gradients, and of weights in every call. A run quantises the
weights of experts once a step where it keeps their codes, so with several microbatches it is a little faster than here.
A dense linear layer is measured alone. In a run the compiler may fuse a cast with the norm or activation before it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.config import Recipe, RecipeError
from titan_moe.config.formats import GemmFormats
from titan_moe.kernels.experts.fused_mlp import with_scores_first
from titan_moe.kernels.registry import Sample, Tunable, load_all
from titan_moe.kernels.timing import Stopwatch, replayed_ms
from titan_moe.plan.formats_to_measure import formats_to_measure
from titan_moe.plan.hardware import Capability
from titan_moe.plan.kernel_shapes import Shape
from titan_moe.plan.kernel_table import Measured
from titan_moe.precision.experts import NATIVE
from titan_moe.precision.linears import NATIVE as NATIVE_LINEARS
from titan_moe.precision.linears import convert_linear
from titan_moe.titan.torchao import require_torchao
from titan_moe.train.tune_times import measured_today, time_backends

logger = logging.getLogger("titan_moe")


def measure_formats(
    recipe: Recipe,
    world_size: int,
    device: torch.device,
    capability: Capability,
    stopwatch: Stopwatch = replayed_ms,
) -> Iterator[Measured]:
    """Time the experts and each distinct linear layer of the recipe in every native format of a compute capability.

    A format that fails is left out. What cannot be compared with compute is not written.
    """
    is_compiled = recipe.compile.compiles(device.type)
    compared = formats_to_measure(recipe, world_size, capability)
    has_linears = any(entry.operation == "linear_in_formats" for entry in compared)
    lacks_torchao = has_linears and not _has_torchao()
    for operation, shape, formats in compared:
        if operation == "linear_in_formats" and lacks_torchao:
            formats = [each for each in formats if each in NATIVE_LINEARS]
        tunable = TUNABLES[operation](formats, shape)
        logger.info("%s: %s", operation, ", ".join(f"{size} {name}" for name, size in shape.items()))
        ms = time_backends(tunable, tunable.candidates, shape, device, stopwatch, is_compiled, "it is left out")
        if "compute" in ms and len(ms) > 1:
            yield measured_today(operation, shape, ms)


def _has_torchao() -> bool:
    try:
        require_torchao("precision.linears")
    except RecipeError as error:
        logger.warning("linear_in_formats: torchao's layers are not measured: %s", error)
        return False
    return True


def experts_in_formats(formats: Iterable[GemmFormats], shape: Shape) -> Tunable:
    """Fused experts in compute, and in the formats that have kernels."""
    tunable = load_all()["fused_expert_mlp"].tunable
    assert tunable is not None
    native = {str(each): with_scores_first(NATIVE[each]) for each in formats if each in NATIVE}
    return Tunable("experts_in_formats", {"compute": tunable.candidates["fused"], **native}, tunable.draw)


def linear_in_formats(formats: Iterable[GemmFormats], shape: Shape, backend: str = "native") -> Tunable:
    """A dense linear layer in compute, and as it is converted to each format."""
    candidates: dict[str, Callable[..., Tensor]] = {"compute": nn.functional.linear}
    for each in formats:
        plain = nn.Linear(shape["input"], shape["output"], bias=False, device="meta")
        candidates[str(each)] = partial(_call, convert_linear(plain, each, backend))
    return Tunable("linear_in_formats", candidates, _draw_linear)


def _call(linear: nn.Module, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """A layer with a given weight, so that both gradients are computed."""
    return torch.func.functional_call(linear, {"weight": weight_OI}, (x_TI,))


def _draw_linear(shape: Mapping[str, Any], device: torch.device) -> Sample:
    num_tokens, inputs, outputs = (shape[name] for name in ("tokens", "input", "output"))
    x_TI = torch.randn(num_tokens, inputs, device=device, dtype=torch.bfloat16)
    weight_OI = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) / inputs**0.5
    return Sample("", (x_TI, weight_OI), 2)


TUNABLES: Mapping[str, Callable[[Iterable[GemmFormats], Shape], Tunable]] = {
    "experts_in_formats": experts_in_formats,
    "linear_in_formats": linear_in_formats,
}
"""One for each of `FORMAT_OPERATIONS`."""
