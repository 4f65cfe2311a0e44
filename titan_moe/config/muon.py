"""Muon: `[optim.muon]` of a recipe."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MuonConfig:
    """Muon (kellerjordan.github.io/posts/muon, arXiv:2502.16982), with the defaults of `torch.optim.Muon`."""

    momentum: float = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Whether the update is that of the next step: the gradient enters it once more (Nesterov)."""
    ns_steps: int = 5
    """Steps of Newton-Schulz, a quintic polynomial with fixed coefficients, in bf16."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How the learning rate of a matrix of R rows and C columns follows its shape.
    `match_rms_adamw`: times 0.2 sqrt(max(R, C)), so that an update is as large as one of AdamW: `optim.lr` and
    `optim.weight_decay` of AdamW fit (Moonlight, Kimi K2).
    `original`: times sqrt(max(1, R / C))."""
    lr_scale: float = 1.0
    """Learning rate of the matrices as a multiple of `optim.lr`, which the other parameters have. `original` wants
    rates of some 0.02."""
