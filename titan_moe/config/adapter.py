"""Adapters: low-rank factors beside frozen weights."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

AdapterKind = Literal["attention", "dense", "shared", "experts"]
KINDS: tuple[AdapterKind, ...] = get_args(AdapterKind)
PROJECTIONS = ("gate_up", "down")
BaseFormat = Literal["compute", "fp8_rowwise", "fp8_blockwise"]
SCALED_BLOCK = 128
"""Rows and columns of a block of `fp8_blockwise`."""


@dataclass(frozen=True)
class AdapterOfKind:
    """Rank and alpha of the adapters of one kind of modules."""

    rank: int = 0
    """Rank of these adapters; 0 means `model.adapter.rank`."""
    alpha: float = 0.0
    """Alpha of these adapters; 0 means `model.adapter.alpha`."""


@dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters (LoRA, arXiv:2106.09685): a weight W is frozen, and W + scale · B A is used, of which A [rank,
    inputs] and B [outputs, rank] train. Each projection to queries, keys and values, and each gate and up, has its own,
    and each routed expert, as in PEFT's files. Frozen weights are in compute's dtype, without masters and moments.
    `optim.trainable` names what else trains: routers, norms, embeddings."""

    rank: int = 0
    """Rank of the adapters; 0 means none. PEFT's `r`."""
    alpha: float = 16.0
    """The scale is alpha / rank. PEFT's `lora_alpha`."""
    targets: tuple[str, ...] = ("attention", "experts")
    """The modules with adapters. The head, embeddings, routers, gates and projections of latents have none.
    `attention`: All projections of attention.
    `dense`: Dense feed-forward layers.
    `shared`: Shared experts.
    `experts`: Routed experts, as grouped products."""
    use_rslora: bool = False
    """The scale is alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)."""
    base: BaseFormat = "compute"
    """How frozen linear layers and routed experts are stored, those of attention, dense layers and shared experts with
    and without adapters. Weights are multiplied in compute's dtype in any case; of codes, those of one product are made
    for it, in forward and again in backward, so no weight in compute's dtype is kept. Drawn or loaded weights are
    rounded one after the other (QLoRA, arXiv:2305.14314, with 8 bits). Embeddings, head, routers, norms and latents are
    in compute's dtype.
    `compute`: In compute's dtype.
    `fp8_rowwise`: Codes in e4m3 with a scale, a power of two, for each output.
    `fp8_blockwise`: Codes in e4m3 with a scale, a power of two, for 128 x 128 weights."""
    attention: AdapterOfKind = field(default_factory=AdapterOfKind)
    """Those of attention."""
    dense: AdapterOfKind = field(default_factory=AdapterOfKind)
    """Those of dense layers."""
    shared: AdapterOfKind = field(default_factory=AdapterOfKind)
    """Those of shared experts."""
    experts: AdapterOfKind = field(default_factory=AdapterOfKind)
    """Those of routed experts."""

    @property
    def is_used(self) -> bool:
        """Whether there are adapters."""
        return self.rank > 0 and bool(self.targets)

    @property
    def has_codes(self) -> bool:
        """Whether frozen weights are stored as codes."""
        return self.is_used and self.base != "compute"

    def has(self, kind: AdapterKind) -> bool:
        """Whether modules of a kind have adapters."""
        return self.rank > 0 and kind in self.targets

    def rank_of(self, kind: AdapterKind) -> int:
        """The rank of a kind; 0 without adapters."""
        own: AdapterOfKind = getattr(self, kind)
        return (own.rank or self.rank) if self.has(kind) else 0

    def alpha_of(self, kind: AdapterKind) -> float:
        """The alpha of a kind."""
        own: AdapterOfKind = getattr(self, kind)
        return own.alpha or self.alpha

    def scale_of(self, kind: AdapterKind) -> float:
        """The factor on B A."""
        rank = max(self.rank_of(kind), 1)
        return self.alpha_of(kind) / (math.sqrt(rank) if self.use_rslora else rank)


def kind_of_linear(path: str) -> AdapterKind | None:
    """The kind of a linear layer, by its path in a block; None for one without adapters."""
    owner, _, last = path.rpartition(".")
    if owner == "attention":
        return None if last == "gate" else "attention"
    if last in PROJECTIONS and owner.startswith("feed_forward.shared_experts"):
        return "shared"
    return "dense" if last in PROJECTIONS and owner == "feed_forward" else None


def scales_of_codes(num_rows: int, num_columns: int, base: BaseFormat) -> int:
    """How many scales the codes of a matrix have."""
    if base == "fp8_rowwise":
        return num_rows
    return -(-num_rows // SCALED_BLOCK) * -(-num_columns // SCALED_BLOCK)


def num_matrices(path: str) -> int:
    """How many weights a fused one consists of, by its path: queries, keys and values; gate and up."""
    return {"qkv": 3, "gate_up": 2}.get(path.rpartition(".")[2], 1)
