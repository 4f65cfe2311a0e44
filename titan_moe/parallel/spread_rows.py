"""Texts that are spread over ranks while they are generated: each group of ranks computes some of the rows.

B rows · b rows of a rank · V vocabulary

Ranks of dp compute different rows, and so do ranks of cp that do not have parts of the same ones. All of them run as
many forwards of the same shape, which collectives of FSDP and of experts need, and all get the logits of all rows: so
tokens, sampled ones too, are those of one rank, whatever the layout.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.dispatch.collectives import all_gather_rows
from titan_moe.models.generate import NextLogits
from titan_moe.parallel.mesh import Meshes


class SpreadRows:
    """`NextLogits` of all rows, of which this rank computes its own. Collective."""

    def __init__(self, next_logits: NextLogits, rank: int, num_ranks: int, group: dist.ProcessGroup) -> None:
        """`group` has several ranks one after the other for each of `num_ranks` that have rows of their own."""
        self.next_logits, self.rank, self.num_ranks, self.group = next_logits, rank, num_ranks, group

    def __call__(self, tokens_BN: Tensor, ends_B: Tensor) -> Tensor:
        """Rows [B, N] on all ranks alike, of which row b has `ends_B[b]` tokens -> logits [B, V]."""
        batch = len(ends_B)
        num_own = -(-batch // self.num_ranks)
        own_b = torch.arange(self.rank * num_own, (self.rank + 1) * num_own, device=ends_B.device).clamp(max=batch - 1)
        logits_bV = self.next_logits(tokens_BN[own_b], ends_B[own_b]).contiguous()
        gathered = logits_bV.new_empty(self.group.size(), *logits_bV.shape)
        all_gather_rows(gathered.flatten(0, 1), logits_bV, group=self.group)
        return gathered[:: self.group.size() // self.num_ranks].flatten(0, 1)[:batch]


def spread(next_logits: NextLogits, meshes: Meshes, *, over_cp: bool) -> NextLogits:
    """Let each rank of dp compute rows of its own, and of cp too, if each has all tokens of its rows."""
    rank, num_ranks, cp = meshes.data_rank, meshes.sizes.dp, meshes.sizes.cp
    if over_cp:
        rank, num_ranks = rank * cp + meshes.context_rank, num_ranks * cp
    return SpreadRows(next_logits, rank, num_ranks, meshes.data_group) if num_ranks > 1 else next_logits
