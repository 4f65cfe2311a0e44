"""QK-clip (MuonClip, Kimi K2, arXiv:2507.20534, section 2.1): heads whose logits grow too large are scaled down.

L layers · H query heads · G heads of keys · R rows of a weight

The largest logit M of a head is that of a step, over all microbatches and ranks. A head above the threshold gets the
factor threshold / M, of which each row of its projections has a power. Weights are scaled after the optimizer's step,
moments stay. All of it is on the device: a captured step scales too.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config.qk_clip import QKClipConfig
from titan_moe.kernels.optim.split_master import merge_reference, store_split
from titan_moe.parameters import local_chunks, remainder_of


class RowPowers(NamedTuple):
    """Which head each row of a weight belongs to, and its power of the head's factor; the same in all layers."""

    parameters: Sequence[Tensor]  # of the layers: weights, or biases
    matrices: tuple[int, ...]  # the rows of each matrix of a fused weight, as `fused_rows` has them
    heads_R: Tensor  # int64
    powers_R: Tensor  # fp32; 0: the row stays


class QKClip:
    """The layers of a rank, all of one shape. Query heads that share a head of keys have one factor."""

    def __init__(
        self,
        config: QKClipConfig,
        max_logits: Sequence[Tensor],
        num_groups: int,
        weights: Sequence[RowPowers],
        group: dist.ProcessGroup,
    ) -> None:
        """`max_logits` are those of each layer [H], on this rank, until `reduce`. `group` has all ranks of the same
        layers, which compute other heads, or the same heads of other tokens."""
        self.threshold, self.max_logits, self.num_groups = config.threshold, max_logits, num_groups
        self.weights, self.group = weights, group

    def start(self) -> None:
        """Begin a step."""
        for own_H in self.max_logits:
            own_H.fill_(-torch.inf)

    @torch.no_grad()
    def reduce(self) -> None:
        """Take the logits of all ranks, after the last backward of a step. Collective."""
        if self.max_logits:
            all_LH = torch.stack(list(self.max_logits))
            dist.all_reduce(all_LH, dist.ReduceOp.MAX, group=self.group)
            for own_H, of_all_H in zip(self.max_logits, all_LH, strict=True):
                own_H.copy_(of_all_H)

    def largest(self, like: Tensor) -> Tensor:
        """The largest logit of this rank's layers; -inf without any."""
        if not self.max_logits:
            return torch.full_like(like, -torch.inf, dtype=torch.float32)
        return torch.stack(list(self.max_logits)).max().float()

    def num_clipped(self, like: Tensor) -> Tensor:
        """The query heads that the step scales, for a sum over ranks: the first rank of a layer counts them."""
        if not self.max_logits or self.group.rank() > 0:
            return torch.zeros_like(like, dtype=torch.int64)
        heads_per_group = len(self.max_logits[0]) // self.num_groups
        return (self._factors_LG() < 1).sum() * heads_per_group

    @torch.no_grad()
    def __call__(self, found_inf: Tensor | None = None) -> None:
        """Scale the weights of heads above the threshold. Where `found_inf` is 1, all stay."""
        if not self.max_logits:
            return
        factors_LG = self._factors_LG()
        if found_inf is not None:
            factors_LG = torch.where(found_inf > 0, 1.0, factors_LG)
        for parameters, matrices, heads_R, powers_R in self.weights:
            factors_LR = factors_LG[:, heads_R] ** powers_R.to(factors_LG.dtype)
            for parameter, factors_R in zip(parameters, factors_LR, strict=True):
                _scale_rows(parameter, matrices, factors_R)

    def _factors_LG(self) -> Tensor:
        logits_LG = torch.stack(list(self.max_logits)).unflatten(1, (self.num_groups, -1)).amax(2)
        is_clipped_LG = (logits_LG > self.threshold) & logits_LG.isfinite()
        return torch.where(is_clipped_LG, self.threshold / logits_LG, 1.0)


def _scale_rows(parameter: Tensor, matrices: tuple[int, ...], factors_R: Tensor) -> None:
    """Multiply the rows that this rank has, of masters in two parts both of them. A factor of 1 changes no bit."""
    chunks, remainder = local_chunks(parameter, matrices), remainder_of(parameter)
    rests: Sequence[Tensor | None] = [None] * len(chunks)
    if remainder is not None:
        rests = [chunk.values for chunk in local_chunks(remainder, matrices)]
    for (values, offsets), rest in zip(chunks, rests, strict=True):
        own = factors_R[offsets[0] : offsets[0] + len(values)].view(-1, *[1] * (values.ndim - 1))
        if rest is None:
            values.mul_(own)
        else:
            store_split(values, rest, merge_reference(values, rest) * own)
