"""How fast and how precisely, as data: what `[perf]`, `[precision]`, `[compile]`, `[memory]` of a recipe may say."""

from dataclasses import dataclass, field
from typing import Literal

from titan_moe.config.kernels import KernelOverrides, Kernels, choose_kernels

Dtype = Literal["bf16", "fp32", "fp64"]


@dataclass(frozen=True)
class PerfConfig:
    """Which kernels run."""

    kernels: Literal["grouped_mm", "fused", "reference"] = "grouped_mm"
    """`grouped_mm` is PyTorch throughout: experts are gather, torch.nn.functional.grouped_mm (bf16, and fp32 on CPU),
    SwiGLU and sum; `fused` takes our Triton kernels: rows are gathered inside the experts' GEMMs, and less is kept for
    backward (bf16 on GPUs); `reference` serves experts in a plain loop, slow and right, in fp64 too."""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """Backend of scaled dot product attention; `auto` lets PyTorch choose, any other name is preferred over the
    rest."""
    loss_chunk_tokens: int = 4096
    """Tokens whose logits exist at one time in the fused head and cross entropy; 0 makes all logits at once."""
    override: KernelOverrides = field(default_factory=KernelOverrides)
    """Single operations that differ from what `kernels` stands for."""

    @property
    def chosen_kernels(self) -> Kernels:
        """The implementation of each operation."""
        return choose_kernels(self.kernels, self.override)


@dataclass(frozen=True)
class PrecisionConfig:
    """Three dtypes of training; math that needs fp32 (norms, router, scores, softmax, loss) never goes below it."""

    compute: Dtype = "bf16"
    """Parameters and activations in forward and backward."""
    master: Dtype = "fp32"
    """Parameters that the optimizer updates, its two moments, and the gradients that it reads."""
    reduce: Dtype = "fp32"
    """Gradients while they are summed over ranks."""


@dataclass(frozen=True)
class CompileConfig:
    """What torch.compile sees."""

    regional: Literal["on_cuda", "on", "off"] = "on_cuda"
    """Compile the dense part and the experts of every block, each as one full graph: on GPUs only, always, or never."""
    extent: Literal["pieces", "block"] = "pieces"
    """How much one graph spans: `pieces` leaves the dispatch between them eager; `block` takes a whole block, dispatch
    and all, which needs a dispatcher that reads nothing on the host (`local`, `allgather`) and leaves a trace one part
    a block. Not measured on a GPU yet."""


@dataclass(frozen=True)
class MemoryConfig:
    """What is recomputed in backward instead of kept."""

    recompute: Literal["none", "experts", "block"] = "none"
    """`experts` recomputes the expert MLPs (no message is repeated); `block` recomputes whole blocks, dispatch
    included."""
