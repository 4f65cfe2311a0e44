"""The implementations that `perf.kernels` and `[perf.override]` of a recipe choose from."""

from dataclasses import astuple, dataclass, replace
from typing import Literal

Experts = Literal["grouped_mm", "fused", "reference"]
Backend = Literal["torch", "triton"]
Attention = Literal["sdpa", "flex"]
GROUPED_MM_STRIDE_BYTES = 16
"""Rows of operands of `torch.nn.functional.grouped_mm` start at multiples of it."""


@dataclass(frozen=True)
class Kernels:
    """The implementations that a model is built with; parallel/ reads that of `gradients`."""

    experts: Experts = "grouped_mm"
    permute: Backend = "torch"
    router: Backend = "torch"
    rotary: Backend = "torch"
    head: Backend = "torch"
    gradients: Backend = "torch"
    attention: Attention = "sdpa"

    @property
    def are_compiled(self) -> bool:
        """Whether a GPU compiles some at their first launch: those in Triton, and FlexAttention."""
        return not {"fused", "triton", "flex"}.isdisjoint(astuple(self))


@dataclass(frozen=True)
class KernelOverrides:
    """Implementations of single operations, in place of those of `perf.kernels`; `no` overrides nothing."""

    experts: Literal["no", "grouped_mm", "fused", "reference"] = "no"
    """The expert MLP: gather, two GEMMs with SwiGLU between them, sum. With `fused`, shared experts and dense layers
    recompute their activation in backward, too, and GEMMs of linear layers add what adapters beside them make."""
    permute: Literal["no", "torch", "triton"] = "no"
    """Permute: sorting (token, expert) assignments by expert."""
    router: Literal["no", "torch", "triton"] = "no"
    """The router: logits, scores, top-k, weights and counts."""
    rotary: Literal["no", "torch", "triton"] = "no"
    """Norm and rotation of queries and keys in `gqa`; in `mla` queries, keys and values from projections, with the
    rotation."""
    head: Literal["no", "torch", "triton"] = "no"
    """Cross entropy of the output head: softmax and its gradient between the GEMMs, and their buffers."""
    gradients: Literal["no", "torch", "triton"] = "no"
    """Accumulation of bf16 gradients of expert weights into fp32, where experts are unsharded (edp = 1); elsewhere FSDP
    does it."""


DEFAULT_KERNELS = Kernels()
PRESETS = {
    "auto": DEFAULT_KERNELS,  # until plan.choice.kernels knows the device
    "grouped_mm": DEFAULT_KERNELS,
    "fused": Kernels("fused", "triton", "triton", "triton", "triton", "triton"),
    "reference": Kernels(experts="reference"),
}
"""`perf.kernels` -> implementations."""


def choose_kernels(preset: str, override: KernelOverrides) -> Kernels:
    """The preset, with the operations that the recipe overrides."""
    return replace(PRESETS[preset], **{name: backend for name, backend in vars(override).items() if backend != "no"})
