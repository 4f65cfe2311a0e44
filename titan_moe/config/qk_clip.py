"""QK-clip: `[optim.qk_clip]` of a recipe."""

from dataclasses import dataclass


@dataclass(frozen=True)
class QKClipConfig:
    """Scale down the projections of heads whose attention logits grow too large (MuonClip, Kimi K2, arXiv:2507.20534,
    section 2.1; `qk_clip` of Megatron). It goes with every `optim.kind`."""

    threshold: float = 0.0
    """The largest attention logit of a head, before its softmax, up to which its projections stay; 0 never measures or
    scales any. After a step in which a head had a larger one, M, in any microbatch of any rank, its queries and keys
    are multiplied so that their products are threshold / M of what they were. Query heads that share a key head are
    scaled together, by the largest logit of them all, as Megatron does. Kimi K2 and Megatron have 100. Costs half of
    the FLOPs of attention's forward."""
    alpha: float = 0.5
    """How the factor is divided: queries have the power `alpha` of it, keys the rest. In `mla` that is of the parts
    without rotation. Queries have all of the factor in their rotated part, because heads share that of keys."""

    @property
    def is_used(self) -> bool:
        """Whether logits are measured, and projections scaled."""
        return self.threshold > 0
