"""How a model is spread over ranks, as data: what `[parallel]` of a recipe may say."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ParallelConfig:
    """Two views of the same ranks (parallel folding, arXiv:2504.14960).

    Dense `(pp, dp_replicate, dp_shard, cp, tp)` and expert `(pp, edp_replicate, edp, ep, etp)`; `edp` is derived:
    `edp = world / (pp * dp_replicate * ep * etp)`, `edp_replicate = dp_replicate`.
    """

    pp: int = 1
    """Pipeline stages. Only 1 works today."""
    dp_replicate: int = 1
    """Replicas of the sharded model (HSDP): parameters are sharded inside a replica, gradients are summed over replicas too."""
    dp_shard: int = -1
    """Ranks that each dense parameter is sharded over (FSDP2); -1 takes all ranks that the other axes leave."""
    cp: int = 1
    """Context-parallel ranks, which split a sequence. Only 1 works today."""
    tp: int = 1
    """Tensor-parallel ranks. Only 1 works today."""
    ep: int = 1
    """Expert-parallel ranks: each holds num_experts / ep experts of a layer. Folded over the dense ranks of a replica."""
    etp: int = 1
    """Tensor-parallel ranks inside an expert. Only 1 works today."""
    dispatcher: Literal["local", "allgather", "alltoall"] = "local"
    """How rows reach their experts: `local` moves nothing (ep = 1), `allgather` gathers every row of the ep group (no host read), `alltoall` sends each row once to each rank that wants it (one host read a layer)."""
    reshard_after_forward: bool = True
    """Free the gathered dense parameters of a block after its forward and gather them again in backward; off trades memory for one all-gather a block."""
    reshard_experts_after_forward: bool = True
    """The same for the gathered experts of a block (there is nothing to gather where edp = 1)."""
