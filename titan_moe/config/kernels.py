"""Which implementation of each operation runs: what `perf.kernels` and `[perf.override]` of a recipe choose from."""

from dataclasses import asdict, dataclass, replace
from typing import Literal

Experts = Literal["grouped_mm", "fused", "reference"]
Backend = Literal["torch", "triton"]
Attention = Literal["sdpa", "flex"]


@dataclass(frozen=True)
class Kernels:
    """The implementations that a model is built with; a model of one's own takes the default or names some.

    What adds `gradients` up is no part of the model: who spreads it asks.
    """

    experts: Experts = "grouped_mm"
    permute: Backend = "torch"
    router: Backend = "torch"
    rotary: Backend = "torch"
    head: Backend = "torch"
    gradients: Backend = "torch"
    attention: Attention = "sdpa"


@dataclass(frozen=True)
class KernelOverrides:
    """Single operations that differ from what `perf.kernels` stands for; for measurements, and around a bad kernel."""

    experts: Literal["no", "grouped_mm", "fused", "reference"] = "no"
    """The expert MLP: gather, two GEMMs with SwiGLU between them, sum; `fused` has backward of shared experts and dense
    layers make their activation anew, too. `no` overrides nothing."""
    permute: Literal["no", "torch", "triton"] = "no"
    """Sorting the routed rows by expert."""
    router: Literal["no", "torch", "triton"] = "no"
    """The router: logits, scores, choice, weights and counts."""
    rotary: Literal["no", "torch", "triton"] = "no"
    """Norm and rotation of queries and keys in `gqa`; `mla` rotates in PyTorch, whatever this says."""
    head: Literal["no", "torch", "triton"] = "no"
    """Cross entropy of the output head: softmax and its gradient between the GEMMs, and their buffers."""
    gradients: Literal["no", "torch", "triton"] = "no"
    """Adding a microbatch's bf16 gradients of expert weights to the fp32 ones that the optimizer reads, where experts
    lie whole on a rank (edp = 1) and their block is not one graph; elsewhere FSDP or the graph adds, whatever this
    says."""


DEFAULT_KERNELS = Kernels()
PRESETS = {
    "auto": DEFAULT_KERNELS,  # until plan.kernel_choice has looked at the tables of a device
    "grouped_mm": DEFAULT_KERNELS,
    "fused": Kernels("fused", "triton", "triton", "triton", "triton", "triton"),
    "reference": Kernels(experts="reference"),
}
"""`perf.kernels` -> what it stands for."""


def choose_kernels(preset: str, override: KernelOverrides) -> Kernels:
    """The preset, with the operations that the recipe overrides."""
    return replace(PRESETS[preset], **{name: backend for name, backend in asdict(override).items() if backend != "no"})
