"""`[parallel]` of a recipe, and the sizes of the mesh axes that follow."""

import math
import os
from dataclasses import dataclass
from typing import Annotated, Literal

from titan_moe.config.dispatchers import DISPATCHERS, DispatcherFacts, facts_of
from titan_moe.config.precision import BYTES_OF_DTYPE, PrecisionConfig
from titan_moe.config.schema import OneOf


@dataclass(frozen=True)
class ParallelConfig:
    """Two views of the same ranks (parallel folding, arXiv:2504.14960).

    Dense `(pp, dp_replicate, dp_shard, cp, tp)` and expert `(pp, edp_replicate, edp, ep, etp)`; `edp` is derived:
    `edp = world / (pp * dp_replicate * ep * etp)`, `edp_replicate = dp_replicate`.
    """

    pp: int = 1
    """Pipeline-parallel ranks: each has consecutive layers, and sends hidden states and their gradients to the ranks of
    the layers after and before. For models that the other axes do not fit into memory, and between nodes: a stage sends
    the hidden states of a microbatch, where ep sends rows and FSDP parameters. Ranks wait for each other at the start
    and the end of a step (the bubble, which `titan-moe check` prints), so a step needs microbatches: at least pp, and
    several times as many for a small bubble."""
    pp_schedule: Literal["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"] = "1f1b"
    """The order of forwards and backwards on each pipeline rank; the numbers are the same.

    `1f1b`: One forward, one backward, with one stage a rank (arXiv:2104.04473). At most pp microbatches are in flight.
    `interleaved_1f1b`: The same with vpp stages a rank, and the bubble divided by vpp (Megatron's virtual pipeline,
    arXiv:2104.04473, section 2.2), for vpp times the messages and more activations. The microbatches of a step are a
    multiple of pp.
    `interleaved_zero_bubble`: The same with weight gradients apart from those of activations: they fill the bubble
    (ZB1P, arXiv:2401.10241). A stage's activations stay until its weight gradients.
    `zbv`: Two stages a rank, from the first rank to the last and back (V), and split backwards. No bubble in the middle
    of a step where forward, gradients of activations and of weights take equal time, with the activations of 1f1b
    (ZB-V, arXiv:2401.10241).
    `dualpipev`: V too. In the middle of a step the forward of one microbatch is beside the backward of another
    (DualPipe, arXiv:2412.19437, cut in half): with overlap = "microbatch" they hide each other's communication over ep.
    At least 2 * pp microbatches.
    """
    vpp: int = 1
    """Stages of a pipeline rank (Megatron's virtual pipeline): 1 with `1f1b`, 2 with `zbv` and `dualpipev`, at least 2
    with the interleaved schedules."""
    pp_layout: str = ""
    """What each of the pp * vpp stages has, in the language of Megatron's --pipeline-model-parallel-layout, such as
    "Et*3|(tt|)*29tL": E is the embedding, t a layer, L the last norm, head and loss; | is the border of two stages, *n
    repeats the letter or (group) before it; commas and spaces are ignored, and a stage may be empty. Empty: consecutive
    layers, so that the slowest stage has the fewest FLOPs, with attention, experts and the head."""
    dp_replicate: int = 1
    """Replicas of the sharded model (HSDP): parameters are sharded inside a replica, gradients are summed over
    replicas too."""
    dp_shard: int = -1
    """Ranks that each dense parameter is sharded over (FSDP2), together with cp; -1 takes all ranks that the other axes
    leave."""
    cp: int = 1
    """Context-parallel ranks, which split every sequence, for sequences whose activations one rank does not hold. Each
    brings other tokens to the experts; attention still sees whole sequences. Dense parameters are sharded over
    dp_shard * cp ranks. Divides the sequence, together with tp."""
    cp_kind: Literal["ulysses", "allgather", "ring"] = "ulysses"
    """How attention sees the sequences that context-parallel ranks split.

    `ulysses`: Between projection and attention, each rank gives tokens and gets heads: all tokens of num_heads / cp of
    them (arXiv:2309.14509). Needs heads for all ranks; with fewer key/value heads than ranks, ranks share them.
    Attention runs as without cp, plain causal too. `mla` gathers its latents instead of keys and values.
    `allgather`: Each rank has its queries, and gathers the keys and values of all (arXiv:2407.21783, section 3.3.2), or
    the latents of `mla`. Any number of heads. A rank has the r-th chunk from the start of a sequence and the r-th from
    its end, so causal attention has equal work on all ranks. Every layer has a mask: take perf.attention = "flex" on
    GPUs, which skips masked blocks, as SDPA does not.
    `ring`: Each rank has its queries, and the keys and values of one rank after the other go round (arXiv:2310.01889):
    sent while those before are attended to, visible pairs computed alone, and never those of all tokens in memory. Any
    number of heads, and the tokens of `allgather`. For `gqa` with plain causal attention, by kernels that return a
    log-sum-exp: cuDNN's with perf.attention = "auto" on GPUs (FlashAttention's with run.is_deterministic, and for heads
    wider than 128).
    """
    tp: int = 1
    """Tensor-parallel ranks, which split the heads of attention, the widths of dense layers and shared experts, and the
    vocabulary; between layers each has a part of every sequence (sequence parallelism, arXiv:2205.05198), so each
    brings other tokens to the experts. Divides the heads; with fewer key/value heads than ranks, ranks share them.
    Every attention and dense layer gathers its input and reduce-scatters its output: for ranks of one node."""
    tp_comm_overlap: bool = False
    """Hide the messages of tensor parallelism behind the GEMMs of attention and dense layers (Megatron's
    --tp-comm-overlap, torchtitan's async TP): tokens are multiplied rank by rank as they arrive, and partial results
    are sent as they are computed, over symmetric memory of the GPUs of a node. Without NVLink multicast. The GEMMs of
    a rank become tp smaller ones, so it needs some thousand tokens. Embedding, head and latents do not overlap."""
    ep: int = 1
    """Expert-parallel ranks: each holds num_experts / ep experts of a layer. Folded over the dense ranks of a
    replica."""
    etp: int = 1
    """Expert-tensor-parallel ranks, which split the hidden width of every routed expert; free of `tp`, with or without
    `ep`. Divides moe.ffn_hidden_size. Before the experts each layer gathers the rows of an etp group, after them it
    reduce-scatters their results: for neighbours of one node, where an expert is too large for a rank, or ep would have
    more ranks than experts. Experts that fit are cheaper with `ep`: a row is sent once to each rank that needs it."""
    dispatcher: Annotated[str, OneOf(DISPATCHERS)] = "local"
    """How rows are sent to their experts. One of your own: titan_moe.register_dispatcher."""
    ep_ranks_per_node: int = 0
    """Ranks of an ep group on one node, for a dispatcher that sends rows once a node; they are consecutive. 0: as many
    as torchrun starts on a node (LOCAL_WORLD_SIZE). A part of a node is possible, where its links differ."""
    overlap: Literal["none", "tile", "microbatch"] = "none"
    """What hides communication behind compute; the numbers are the same.

    `none`: Nothing.
    `tile`: Inside a node, with a dispatcher that shares memory and fused experts: some thread blocks of the experts'
    GEMMs get rows from peers and put partial sums there, tile by tile, in forward and backward (COMET,
    arXiv:2502.19811).
    `microbatch`: Between nodes, with collectives: the forward of a microbatch is interleaved with the backward of the
    one before, block by block (DualPipe without pipeline stages, arXiv:2412.19437). Weight gradients of fused experts
    are delayed until the gradients of rows are sent. Needs `accumulate_unsharded`, two or more microbatches a step and
    our own blocks in pieces; keeps the activations of little more than one microbatch. With pp it
    merges the forwards and backwards of a rank, with schedules that have an order for it: `dualpipev`, whose order it
    is; `interleaved_1f1b`, with one more microbatch of a stage in flight (arXiv:2603.07685); `1f1b`, with twice as many
    microbatches in flight. Their bubble stays, if stages take equal time.
    """
    expert_rank_capacity_factor: float | Literal["auto"] = "auto"
    """Room for the rows and expert slots of a rank, over its balanced load, for a dispatcher that can be bounded.
    Nothing is dropped: a step that needs more is taken again without the bound, and counted in the metrics. Where an ep
    group shares memory and experts are fused, it is the room of all layers together for what backward needs (the
    arena); elsewhere that of each layer. With "auto" it follows the need of past steps, with a margin, up to what
    memory holds; the first steps run without a bound. A number is a fixed bound; 0: sizes of the worst case."""
    expert_clones: int | Literal["auto"] = 0
    """Replica slots of a rank: for every exchange whose fullest rank has more than 1.05 times the mean load, hot
    experts are cloned onto ranks with a lower load, which share their tokens (Megatron's ECHO). Exact. "auto": up to 2
    where an ep group shares memory, microbatches are large and the GEMMs need no copy of a rank's own weights with the
    clones (not if experts are sharded, blocks are graphs, or something is recomputed), else 0. 0 is off. A rank
    receives up to expert_clones experts of a layer in forward and sends as many gradients in backward, over collectives
    (ep - 1) times as many."""
    reshard_after_forward: bool = True
    """Free the gathered dense parameters of a block after its forward and gather them again in backward; off trades
    memory for one all-gather a block."""
    reshard_experts_after_forward: bool = True
    """The same for the gathered experts of a block. Where edp = 1 nothing is gathered, and this changes nothing:
    experts are cast to precision.compute, and the copies of all layers stay until their backward, unless
    memory.recompute has them made again; in a pipeline they stay for the step."""
    accumulate_unsharded: bool = False
    """Gather parameters in the first microbatch of a step and reduce gradients in its last (no_sync), instead of two
    gathers and a reduction a microbatch; nothing is resharded after forward then. Every rank holds unsharded parameters
    in precision.compute and unsharded gradients in precision.reduce, in which microbatches are summed. Saves
    communication, and copies on a single rank. Unsharded experts (edp = 1) are cast once a step instead of once a use;
    their gradients are always summed in precision.master."""

    @property
    def length_multiple(self) -> int:
        """What divides the lengths of sequences: cp and tp ranks have equal parts, in two chunks unless `ulysses`."""
        chunks = 2 if self.cp > 1 and self.cp_kind != "ulysses" else 1
        return chunks * self.cp * self.tp

    @property
    def has_auto_capacity(self) -> bool:
        """Whether the capacity follows the load."""
        return self.expert_rank_capacity_factor == "auto" and self.facts.can_be_bounded

    @property
    def fixed_capacity_factor(self) -> float:
        """The capacity factor that the recipe gives; 0 for none, and for `auto`."""
        factor = self.expert_rank_capacity_factor
        return 0.0 if isinstance(factor, str) else factor

    @property
    def fixed_expert_clones(self) -> int:
        """The replica slots that the recipe gives; 0 for `auto`, which config/clones.py resolves."""
        return 0 if isinstance(self.expert_clones, str) else self.expert_clones

    @property
    def facts(self) -> DispatcherFacts:
        """The facts of the dispatcher.

        Raises: ValueError if it is not in the table.
        """
        return facts_of(self.dispatcher)


@dataclass(frozen=True)
class ParallelSizes:
    """The sizes of all axes of both views, on a given number of ranks."""

    world: int  # all ranks of the run
    pp: int
    dp_replicate: int  # the expert view has as many (`edp_replicate`)
    dp_shard: int
    cp: int
    tp: int
    edp: int  # ranks inside a replica that hold the same experts; FSDP shards each expert over them
    ep: int
    etp: int

    @property
    def dp(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that each dense parameter is sharded over, beside tp."""
        return self.dp_shard * self.cp

    def experts_are_unsharded(self, precision: PrecisionConfig) -> bool:
        """Whether experts bypass FSDP: no other rank holds the same ones, so there is nothing to gather, and gradients
        are summed in the optimizer's dtype, which is as fine as that of the reduction."""
        sums_in_master = BYTES_OF_DTYPE[precision.reduce] <= BYTES_OF_DTYPE[precision.master]
        return self.edp * self.dp_replicate == 1 and sums_in_master


def resolve(parallel: ParallelConfig, world_size: int) -> ParallelSizes:
    """Find the size of every axis on `world_size` ranks.

    Raises: ValueError if an axis does not divide the world; `config.rules` refuses this first, with a way out.
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
    """The number of ranks of a node, from torchrun's environment; all ranks without it, as in `check`.

    Ranks of an ep group are among ep * etp consecutive ones, so a group is on one node if that divides this number.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdigit() and int(local) > 0 else world_size


def ep_ranks_of_a_node(parallel: ParallelConfig, world_size: int) -> int:
    """The number of ranks of an ep group on one node, which has etp of these groups beside each other."""
    on_node = max(ranks_of_a_node(world_size) // max(parallel.etp, 1), 1)
    return parallel.ep_ranks_per_node or min(on_node, parallel.ep)


def smallest_world(parallel: ParallelConfig) -> int:
    """The fewest ranks that both views fit, the default of `check` without `--nproc`."""
    p = parallel
    dense_ranks = p.pp * p.dp_replicate * p.cp * p.tp
    if p.dp_shard != -1:
        return dense_ranks * p.dp_shard
    return math.lcm(dense_ranks, p.pp * p.dp_replicate * p.ep * p.etp)
