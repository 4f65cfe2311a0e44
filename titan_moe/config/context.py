"""The tokens of a sequence that each context-parallel rank has."""

from typing import NamedTuple

from titan_moe.config.parallel import ParallelConfig


class SequenceShard(NamedTuple):
    """A rank's part of every sequence: one chunk, in the order of the ranks, or a chunk from each end.

    With a chunk from each end, causal attention of own queries takes the same work on all ranks (arXiv:2407.21783,
    section 3.3.2): the first chunk attends to fewer tokens than average, the last chunk to as many more.
    """

    rank: int = 0
    num_ranks: int = 1
    is_head_and_tail: bool = False

    def slices(self, num_tokens: int) -> list[slice]:
        """The rank's tokens of a sequence, in ascending order. Its chunks divide the sequence."""
        if not self.is_head_and_tail:
            size = num_tokens // self.num_ranks
            return [slice(self.rank * size, (self.rank + 1) * size)]
        size = num_tokens // (2 * self.num_ranks)
        starts = (self.rank * size, num_tokens - (self.rank + 1) * size)
        return [slice(start, start + size) for start in starts]


WHOLE_SEQUENCES = SequenceShard()


def sequence_shard(parallel: ParallelConfig, rank: int) -> SequenceShard:
    """The part of a context-parallel rank."""
    return SequenceShard(rank, parallel.cp, parallel.cp > 1 and parallel.cp_kind != "ulysses")


CUDNN_HEAD_DIM = 128
"""The widest head of cuDNN's kernels on every GPU; some take wider ones."""


def ring_backend(attention: str, device: str, *, head_dim: int, is_deterministic: bool) -> str:
    """Choose the kernels of ring attention, which must return the log-sum-exp, from `perf.attention` and device type.

    The choice is cuDNN's kernels on GPUs, unless the recipe names others, or has "auto" and cuDNN's do not support the
    recipe. There is no fallback later.
    """
    if device == "cpu":
        return "cpu"
    needs_flash = is_deterministic or head_dim > CUDNN_HEAD_DIM
    return "flash" if attention == "flash" or (attention != "cudnn" and needs_flash) else "cudnn"
