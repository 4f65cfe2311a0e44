"""How fast and how precisely, as data: what `[perf]`, `[precision]`, `[compile]`, `[memory]` of a recipe may say."""

from dataclasses import dataclass, field, replace
from typing import Literal

from titan_moe.config.kernels import KernelOverrides, Kernels, choose_kernels

Dtype = Literal["bf16", "fp32", "fp64"]
BYTES_OF_DTYPE: dict[Dtype, int] = {"bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class PerfConfig:
    """Which kernels run."""

    kernels: Literal["auto", "grouped_mm", "fused", "reference"] = "auto"
    """`auto` takes for each operation what was fastest at the nearest measured shape, on this GPU or another of its
    architecture, by tables that come with the package or that `titan-moe tune` has written. It takes `grouped_mm` where
    Triton cannot run, is not 2 % faster, or nothing was measured. A run logs its choice with the distance to the
    measured shape and writes it into its own recipe; `titan-moe check` shows it.
    `grouped_mm` is PyTorch throughout: experts are gather, torch.nn.functional.grouped_mm (bf16, and fp32 on CPU),
    SwiGLU and sum. `fused` takes our Triton kernels: rows are gathered inside the experts' GEMMs, and less is kept for
    backward (bf16 on GPUs). `reference` computes experts in a plain loop, slow and right, in fp64 too."""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math", "flex"] = "auto"
    """Backend of scaled dot product attention; `auto` lets PyTorch choose, any other name is preferred over the rest.
    Document attention and sliding windows then take a mask of N x N truth values a sequence, and what it hides is
    computed too. `flex` gives these layers to FlexAttention, which skips hidden blocks (GPUs only), and plain causal
    layers to cuDNN. It is not `auto`'s choice: it was not measured yet."""
    loss_chunk_tokens: int = 4096
    """Tokens whose logits exist at one time in the fused head and cross entropy; 0 makes all logits at once. Triton's
    head keeps one buffer of them: with 2048, a head of width 2048 and 152k words takes 1.2 GiB beyond its gradients."""
    override: KernelOverrides = field(default_factory=KernelOverrides)
    """Single operations that differ from what `kernels` stands for."""

    @property
    def chosen_kernels(self) -> Kernels:
        """The implementation of each operation; what measured tables say about `auto` is not in it yet."""
        chosen = choose_kernels(self.kernels, self.override)
        return replace(chosen, attention="flex" if self.attention == "flex" else "sdpa")


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtypes of training; math that needs fp32 (norms, router, scores, softmax, loss) never goes below it."""

    compute: Dtype = "bf16"
    """Parameters and activations in forward and backward."""
    master: Dtype = "fp32"
    """Parameters that the optimizer updates, and the gradients that it reads."""
    reduce: Dtype = "fp32"
    """Gradients while they are summed over ranks."""
    moments: Literal["master", "bf16", "fp32"] = "master"
    """AdamW's two moments: as `master`, or in a dtype of their own, which needs optim.kind = "fused_adamw"."""

    @property
    def moments_dtype(self) -> Dtype:
        """What `moments` comes to."""
        return self.master if self.moments == "master" else self.moments


@dataclass(frozen=True)
class CompileConfig:
    """What torch.compile sees."""

    regional: Literal["on_cuda", "on", "off"] = "on_cuda"
    """Compile the dense part and the experts of every block, each as one full graph: on GPUs only, always, or never."""
    extent: Literal["pieces", "block"] = "pieces"
    """How much one graph spans: `pieces` leaves the dispatch between them eager; `block` takes a whole block, dispatch
    and all, which needs a dispatcher without host reads, and a trace has one part a block then. Where slots are
    bounded, such a block runs uncompiled while the bound is off (a step that is taken again, validation)."""
    cudagraph: Literal["off", "microbatch", "step"] = "off"
    """Record on the GPU and replay: forward and backward of a `microbatch`, or the whole optimizer `step`; the host
    then launches one graph instead of every kernel. `check` says what of a recipe stands in the way."""

    def compiles(self, device: str = "cuda") -> bool:
        """Whether a run compiles on a type of device."""
        return self.regional == "on" or (self.regional == "on_cuda" and device == "cuda")

    def compiles_blocks(self, device: str = "cuda") -> bool:
        """Whether a block is one graph there, dispatch and all, and no hook can run inside it."""
        return self.compiles(device) and self.extent == "block"


@dataclass(frozen=True)
class MemoryConfig:
    """What is recomputed in backward instead of kept."""

    recompute: Literal["none", "experts", "block"] = "none"
    """`experts` recomputes the expert MLPs (no message is repeated, unless they fetch their rows themselves, with
    `parallel.overlap = "tile"`); `block` recomputes whole blocks, dispatch included."""
