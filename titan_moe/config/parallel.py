"""How a model is spread over ranks, as data: what `[parallel]` of a recipe may say, and the sizes that follow."""

import math
import os
from dataclasses import dataclass
from typing import Literal

HOST_READERS = ("alltoall",)
"""Dispatchers that read sizes of the device on the host."""


@dataclass(frozen=True)
class ParallelConfig:
    """Two views of the same ranks (parallel folding, arXiv:2504.14960).

    Dense `(pp, dp_replicate, dp_shard, cp, tp)` and expert `(pp, edp_replicate, edp, ep, etp)`; `edp` is derived:
    `edp = world / (pp * dp_replicate * ep * etp)`, `edp_replicate = dp_replicate`.
    """

    pp: int = 1
    """Pipeline stages. Only 1 works today."""
    dp_replicate: int = 1
    """Replicas of the sharded model (HSDP): parameters are sharded inside a replica, gradients are summed over
    replicas too."""
    dp_shard: int = -1
    """Ranks that each dense parameter is sharded over (FSDP2); -1 takes all ranks that the other axes leave."""
    cp: int = 1
    """Context-parallel ranks, which split a sequence. Only 1 works today."""
    tp: int = 1
    """Tensor-parallel ranks. Only 1 works today."""
    ep: int = 1
    """Expert-parallel ranks: each holds num_experts / ep experts of a layer. Folded over the dense ranks of a
    replica."""
    etp: int = 1
    """Tensor-parallel ranks inside an expert. Only 1 works today."""
    dispatcher: Literal["local", "allgather", "alltoall", "symm_mem"] = "local"
    """How rows reach their experts: `local` moves nothing (ep = 1), `allgather` gathers every row of the ep group
    (no host read), `alltoall` sends each row once to each rank that wants it (one host read a layer), `symm_mem` sends
    as few as that and reads nothing on the host: GPUs of one node read and write memory that they share, which has a
    place on each of them for every row of its largest microbatch from every rank. On 8 H200s it is the fastest, and
    wants `expert_rank_capacity_factor`: the worst case of a large model fits into no memory."""
    overlap: Literal["none", "tile", "microbatch"] = "none"
    """What hides the dispatcher's messages. `none`: nothing, each is waited for where it starts. `tile`: for `symm_mem`
    with fused experts, inside a node; some thread blocks of the experts' GEMMs get rows from peers and put sums there,
    tile by tile, in forward and backward. `microbatch`: for `alltoall` and `allgather`, between nodes; the forward of
    each microbatch is interleaved with the backward of the one before, block by block, so that the messages of one are
    hidden by the compute of the other (DeepSeek-V3's DualPipe, arXiv:2412.19437, without pipeline stages), and weight
    gradients of fused experts are delayed until the rows' gradients have been sent. It needs `accumulate_unsharded`, two
    or more microbatches a step and our own blocks in pieces, and keeps the activations of little more than one
    microbatch. The numbers are the same in all three."""
    expert_rank_capacity_factor: float = 0.0
    """Slots that a rank lays out for its experts, over its balanced load, for `allgather` and `symm_mem`; for the
    latter also the rows that it keeps for backward, over those that random routing sends it. 0 lays out the worst case.
    Nothing is dropped: a step whose rows do not fit is taken again without the bound, and counted in the metrics."""
    expert_clones: int = 0
    """Spare expert slots of a rank: for every exchange, hot experts are cloned onto ranks that have room, and their
    choices are shared, so that the fullest rank holds the others up less. Exact; 0 is off. One or two are enough for a
    fullest rank of 1.2 times the mean load. Costs messages: with `symm_mem` a rank gets expert_clones experts of
    a layer forward and gives as many gradients of experts backward, else (ep - 1) times as many; and it copies its own
    for the GEMMs."""
    reshard_after_forward: bool = True
    """Free the gathered dense parameters of a block after its forward and gather them again in backward; off trades
    memory for one all-gather a block."""
    reshard_experts_after_forward: bool = True
    """The same for the gathered experts of a block. Where edp = 1 nothing is gathered, and this changes nothing:
    experts are cast to precision.compute, and the copies of all layers stay until their backward, unless
    memory.recompute has them made again."""
    accumulate_unsharded: bool = False
    """Gather parameters with the first microbatch of a step and reduce gradients with its last, instead of two gathers
    and a reduction a microbatch; nothing is resharded after forward then. Costs whole parameters in the dtype of
    compute and whole gradients in that of the reduction, on every rank; buys their traffic, on one rank too. With
    precision.reduce = "bf16" the microbatches add up in bf16. Experts that lie whole on a rank (edp = 1) are cast once
    a step then, not once a use, and their gradients add up in precision.master whatever this says."""


@dataclass(frozen=True)
class ParallelSizes:
    """Every axis of both views of the world, resolved: what `[parallel]` means on a given number of ranks."""

    world: int
    """All ranks of the run."""
    pp: int
    """Pipeline stages."""
    dp_replicate: int
    """Replicas of the sharded model; the expert view has as many (`edp_replicate`)."""
    dp_shard: int
    """Ranks that each dense parameter is sharded over."""
    cp: int
    """Context-parallel ranks."""
    tp: int
    """Tensor-parallel ranks."""
    edp: int
    """Ranks inside a replica that hold the same experts; FSDP shards each expert over them."""
    ep: int
    """Expert-parallel ranks."""
    etp: int
    """Tensor-parallel ranks inside an expert."""

    @property
    def dp(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard


def resolve(parallel: ParallelConfig, world_size: int) -> ParallelSizes:
    """Give every axis its size on `world_size` ranks.

    Raises: ValueError if an axis does not divide the world; `config.rules` says the same beforehand, with a way out.
    """
    p = parallel
    fixed = p.pp * p.dp_replicate * p.cp * p.tp
    dp_shard = world_size // fixed if p.dp_shard == -1 else p.dp_shard
    if dp_shard < 1 or fixed * dp_shard != world_size:
        raise ValueError(f"pp * dp_replicate * dp_shard * cp * tp is not the number of ranks, {world_size}: {p}")
    expert_ranks = p.pp * p.dp_replicate * p.ep * p.etp
    if world_size % expert_ranks:
        raise ValueError(f"pp * dp_replicate * ep * etp = {expert_ranks} does not divide the {world_size} ranks: {p}")
    edp = world_size // expert_ranks
    return ParallelSizes(world_size, p.pp, p.dp_replicate, dp_shard, p.cp, p.tp, edp, p.ep, p.etp)


def ranks_of_a_node(world_size: int) -> int:
    """How many ranks share a node, as torchrun told this one; without it, as in `check`, all of them.

    The expert view puts the ranks of an ep group side by side, so a group is on one node if ep divides this number.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdigit() and int(told) > 0 else world_size


def smallest_world(parallel: ParallelConfig) -> int:
    """Find the fewest ranks that both views can be laid over: what `check` assumes when nobody says how many there
    are."""
    p = parallel
    dense_ranks = p.pp * p.dp_replicate * p.cp * p.tp
    if p.dp_shard != -1:
        return dense_ranks * p.dp_shard
    return math.lcm(dense_ranks, p.pp * p.dp_replicate * p.ep * p.etp)
