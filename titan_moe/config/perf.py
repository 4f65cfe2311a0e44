"""Kernels, compilation and memory: `[perf]`, `[compile]`, `[memory]` of a recipe."""

from dataclasses import dataclass, field, replace
from typing import Literal

from titan_moe.config.kernels import KernelOverrides, Kernels, choose_kernels


@dataclass(frozen=True)
class PerfConfig:
    """Kernels."""

    kernels: Literal["auto", "grouped_mm", "fused", "reference"] = "auto"
    """The implementations of the operations. `perf.override` sets single ones.
    `auto`: `fused` in bf16 on GPUs of compute capability 9.0 (H100, H200), where each of its kernels was measured to be
    faster, except for what this recipe excludes; elsewhere `grouped_mm`. The log and `titan-moe check` show the choice,
    and the saved recipe of the run contains it.
    `grouped_mm`: PyTorch. Experts are gather, torch.nn.functional.grouped_mm (bf16, on CPUs also fp32), SwiGLU and sum.
    `fused`: Triton (bf16 on GPUs). The GEMMs of the experts gather their rows, and less is kept for backward.
    `reference`: The experts are a loop in PyTorch: slow, for comparison, also in fp64. Formats whose
    native kernels are Triton are refused beside it; precision.backend = "emulated" is their reference."""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math", "flex"] = "auto"
    """Backend of scaled dot product attention (SDPA). With document attention or sliding windows, SDPA gets an N x N
    mask per sequence and computes masked pairs too; on GPUs a mask of more than 1 GiB is refused.
    `auto`: PyTorch chooses.
    `cudnn`: Prefer cuDNN.
    `flash`: Prefer FlashAttention.
    `efficient`: Prefer memory-efficient attention.
    `math`: Prefer plain PyTorch.
    `flex`: FlexAttention (arXiv:2412.05496) for layers with masks, which skips masked blocks (GPUs only); cuDNN for
    plain causal layers."""
    loss_chunk_tokens: int = 4096
    """Tokens per chunk of the output head and cross entropy: only one chunk's logits exist at a time. 0 computes all
    logits at once."""
    override: KernelOverrides = field(default_factory=KernelOverrides)
    """Implementations of single operations, instead of those of `kernels`."""

    @property
    def chosen_kernels(self) -> Kernels:
        """The implementation of each operation. `auto` must be resolved first; here it stands for the default."""
        chosen = choose_kernels(self.kernels, self.override)
        return replace(chosen, attention="flex" if self.attention == "flex" else "sdpa")

    @property
    def fuses_experts(self) -> bool:
        """Whether routed experts are Triton's, which `auto` takes on GPUs wherever no rule forbids it."""
        return self.kernels == "auto" or self.chosen_kernels.experts == "fused"


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile and CUDA graphs."""

    regional: Literal["on_cuda", "on", "off"] = "on_cuda"
    """Compile every block with `fullgraph=True`, in pieces: the dense part, the router, the experts and the shared
    experts are one graph each, and a dense block is one. Dispatch and combine run eagerly.
    `on_cuda`: On GPUs.
    `on`: On all devices.
    `off`: Never."""
    cudagraph: Literal["off", "step"] = "off"
    """Capture GPU work as a CUDA graph and replay it, so that the host launches one graph instead of every kernel.
    `titan-moe check` names the settings of a recipe that prevent it.
    `off`: No graph.
    `step`: The whole optimizer step, with all actions and messages of a pipeline rank."""

    def compiles(self, device: str = "cuda") -> bool:
        """Whether a run compiles on a type of device."""
        return self.regional == "on" or (self.regional == "on_cuda" and device == "cuda")


Park = Literal["none", "moments", "states"]
PARKED: dict[Park, tuple[str, ...]] = {
    "none": (),
    "moments": ("exp_avg", "exp_avg_sq"),
    "states": ("exp_avg", "exp_avg_sq", "remainder"),
}
"""By `memory.park`, the states that rest on the host, as the optimizer's kernels name them."""
PARKED_CHUNK_BYTES = 2**28
"""Of parked states that are on the GPU at a time there are two chunks, of this size or of one shard."""


@dataclass(frozen=True)
class MemoryConfig:
    """Memory: activations that are computed again, states of the optimizer that rest on the host."""

    recompute: tuple[str, ...] = ("auto",)
    """What backward computes again instead of keeping it (arXiv:1604.06174, arXiv:2205.05198): names, each for all
    layers, or for some: "norms:8" for the first eight, "norms:-8" for the last, "norms:4-11". Blocks of multi-token
    prediction count as layers behind the others.
    `auto`: On GPUs, the cheapest parts with which a step fits the memory, by the plan: nothing where all of it fits.
    `titan-moe check` shows them, and the saved recipe of the run contains them. On CPUs nothing.
    `none`: Keep all activations.
    `norms`: The results of the two norms of a block.
    `qkv_rope`: Normed and rotated queries and keys, and values (gqa with qk_norm).
    `mla_up`: Queries, keys and values, from their latents (mla).
    `attention`: The result of attention, which runs twice.
    `dense_mlp`: The hidden states of dense layers.
    `shared_experts`: The hidden states of shared experts.
    `expert_weights`: Copies of expert weights in compute's dtype, or codes of them.
    `moe_act`: The hidden states of experts, from rows that are kept. No communication is repeated.
    `experts`: Rows and hidden states of experts. Only `parallel.dispatcher = "symm_mem"` gets rows again; others keep
    those that they received. Experts that are not fused run twice.
    `block`: Whole blocks, dispatch and combine included. The experts of each token are kept, 4 bytes a choice: the
    second forward takes those of the first. A block calls each of its routers once."""
    offload: tuple[str, ...] = ()
    """What a block's backward needs and the host keeps meanwhile, in pinned memory: the inputs of parts, by names and
    layers as in `recompute`. It leaves the GPU beside the forward of the next two layers, and comes back one layer
    ahead of its backward. `titan-moe check` shows the memory of the host, and how long the copies take.
    `block`: The residual stream that enters a block.
    `attention`: Queries, keys and values, and the result with its log-sum-exp, which attention keeps too.
    `ffn_norm`: The residual stream between attention and feed-forward."""
    park: Park = "none"
    """States of the optimizer that rest in pinned memory of the host between optimizer steps. A step copies them to the
    GPU and back in chunks, in memory that activations had, and becomes longer by the time of the copies: some 60 ms for
    each GiB (32 GB/s in all). It needs optim.kind = "fused_adamw".
    `none`: None.
    `moments`: Both moments.
    `states`: Both moments, and what bf16 weights lack of their masters, with precision.master = "fp32_split"."""

    def __post_init__(self) -> None:
        if isinstance(self.recompute, str):  # one entry, from Python
            object.__setattr__(self, "recompute", (self.recompute,))
