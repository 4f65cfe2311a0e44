"""`[parallel]` of a recipe, and the sizes of the mesh axes that follow."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Literal

from titan_moe.config.dispatchers import DISPATCHERS, WAY_TO_ADD, DispatcherFacts, facts_of
from titan_moe.config.hashed import hashed_once
from titan_moe.config.precision import BYTES_OF_DTYPE, PrecisionConfig
from titan_moe.config.schema import OneOf

ASSUMED_RANKS_OF_A_NODE = 8
"""In a plan: nearly all machines with GPUs that share memory have so many."""
NUM_CLONES = 2
"""Two replica slots a rank nearly always reduce loads of up to twice the mean to 1.05 times the mean, where that is
more than a clone costs. A rank that owns fewer than four experts has one: each takes the memory of an expert in every
layer."""
_IS_PLAN: ContextVar[bool] = ContextVar("_IS_PLAN", default=False)


@hashed_once
@dataclass(frozen=True)
class ParallelConfig:
    """Two views of the same ranks (parallel folding, arXiv:2504.14960).

    Dense `(pp, dp_replicate, dp_shard, cp, tp)` and expert `(pp, edp_replicate, edp, ep, etp)`; `edp` is derived:
    `edp = world / (pp * dp_replicate * ep * etp)`, `edp_replicate = dp_replicate`.
    """

    pp: int = 1
    """Pipeline-parallel ranks: each has consecutive layers, and sends hidden states to the rank of the next layers and
    gradients to the rank of the previous ones. For models that do not fit into memory with the other axes, and between
    nodes: a stage sends only the hidden states of a microbatch, while ep sends rows and FSDP sends parameters. Ranks
    wait for each other at the start and the end of a step (the bubble, which `titan-moe check` prints). So a step needs
    at least pp microbatches, and several times as many for a small bubble."""
    pp_schedule: Literal["1f1b", "interleaved_1f1b", "zbv", "dualpipev"] = "1f1b"
    """The order of forwards and backwards on each pipeline rank. Results do not depend on it. The last two delay
    weight gradients as far as layers can: `titan-moe check` names those that do not, which make the bubble larger.
    Experts with clones delay none.

    `1f1b`: One forward, one backward, with one stage a rank (arXiv:2104.04473). At most pp microbatches are in flight.
    `interleaved_1f1b`: The same with vpp stages a rank, and the bubble divided by vpp (Megatron's virtual pipeline,
    arXiv:2104.04473, section 2.2), for vpp times the messages and more activations. The number of microbatches of a
    step must be a multiple of pp.
    `zbv`: Two stages a rank, placed from the first rank to the last and back (V), and split backwards: weight gradients
    are computed later and fill the bubble. Activations of a stage are kept until then, as many as with 1f1b. There is
    no bubble in the middle of a step if forward, gradients of activations and gradients of weights take equal time
    (ZB-V, arXiv:2401.10241).
    `dualpipev`: Also a V. In the middle of a step the forward of one microbatch runs together with the backward of
    another (DualPipe, arXiv:2412.19437, cut in half): with overlap = "microbatch" they hide each other's communication
    over ep. Needs at least 2 * pp microbatches.
    """
    vpp: int = 1
    """Stages of a pipeline rank (Megatron's virtual pipeline): 1 with `1f1b`, 2 with `zbv` and `dualpipev`, at least 2
    with `interleaved_1f1b`."""
    pp_layout: str = ""
    """The modules of each of the pp * vpp stages, in the language of Megatron's --pipeline-model-parallel-layout, such
    as "Et*3|(tt|)*29tL". E is the embedding, t a layer, m a block of multi-token prediction, L the last norm, the head
    and the loss; | separates two stages; *n repeats the letter or (group) before it. Commas and spaces are ignored. The
    first stage has E and the last has L, right before it all m: "|mL" has no layer beside them. Stages between them may
    be empty. An empty string divides the layers so that the slowest stage has the fewest FLOPs,
    those of attention, experts and head included."""
    dp_replicate: int = 1
    """Replicas of the sharded model (HSDP): parameters are sharded inside a replica; gradients are also summed over
    replicas."""
    dp_shard: int = -1
    """Ranks that each dense parameter is sharded over (FSDP2), together with cp; -1 takes all ranks that the other axes
    leave."""
    cp: int = 1
    """Context-parallel ranks, which split every sequence, for sequences whose activations do not fit on one rank. Each
    rank sends its own tokens to the experts; attention still covers whole sequences. Dense parameters are sharded over
    dp_shard * cp ranks. cp * tp must divide the sequence length."""
    cp_kind: Literal["ulysses", "allgather", "ring"] = "ulysses"
    """How attention covers the sequences that context-parallel ranks split.

    `ulysses`: Before attention, an all-to-all exchanges tokens for heads: each rank gets all tokens of num_heads / cp
    heads (arXiv:2309.14509). cp must divide the number of heads; ranks share key/value heads if there are fewer of them
    than ranks. Attention runs as without cp and needs no mask if it is plain causal. `mla` gathers its latents instead
    of keys and values.
    `allgather`: Each rank keeps its queries and gathers the keys and values of all tokens (arXiv:2407.21783, section
    3.3.2), or the latents of `mla`. Any number of heads. Rank r has the r-th chunk from the start of a sequence and the
    r-th chunk from its end, so causal attention takes equal work on all ranks. Every layer needs a mask. On GPUs use
    perf.attention = "flex", which skips masked blocks; SDPA computes them.
    `ring`: Each rank keeps its queries. Keys and values are passed around the ranks (arXiv:2310.01889) while attention
    to the previous ones is computed. Masked pairs are not computed, and no rank holds the keys of all tokens.
    Any number of heads; ranks have the same chunks as with `allgather`. For `gqa` with plain causal attention only. Its
    kernels must return a log-sum-exp: with perf.attention = "auto" they are cuDNN's on GPUs, or FlashAttention's with
    run.is_deterministic and for heads wider than 128.
    """
    tp: int = 1
    """Tensor-parallel ranks, which split the heads of attention, the widths of dense layers and shared experts, and the
    vocabulary. Between layers each rank has a part of every sequence (sequence parallelism, arXiv:2205.05198), and
    sends these tokens to the experts. tp must divide the number of heads; ranks share key/value heads if there are
    fewer of them than ranks. Every attention and dense layer gathers its input and reduce-scatters its output, so the
    ranks of a tp group should be on one node."""
    tp_comm_overlap: bool = False
    """Hide the messages of tensor parallelism behind the GEMMs of attention and dense layers (Megatron's
    --tp-comm-overlap, torchtitan's async TP). Tokens are multiplied rank by rank as they arrive, and partial results
    are sent as they are computed, over symmetric memory of the GPUs of a node, without NVLink multicast. Each GEMM
    becomes tp smaller ones, so the option pays from some thousand tokens a rank on. Embedding, head and latents of
    `mla` do not overlap."""
    ep: int = 1
    """Expert-parallel ranks: each holds num_experts / ep experts of a layer. Folded over the dense ranks of a
    replica."""
    etp: int = 1
    """Expert-tensor-parallel ranks, which split the hidden width of every routed expert; independent of `tp`, with or
    without `ep`. Must divide moe.ffn_hidden_size. Before the experts each layer gathers the rows of an etp group; after
    them it reduce-scatters the results. So the ranks of a group should be on one node. Use it if an expert is too large
    for a rank, or if ep would exceed the number of experts. Otherwise `ep` is cheaper: it sends a row only once to each
    rank that needs it."""
    dispatcher: Annotated[str, OneOf(DISPATCHERS, WAY_TO_ADD)] = "local"
    """How rows are sent to their experts. titan_moe.register_dispatcher adds a dispatcher of your own."""
    ep_ranks_per_node: int = 0
    """Consecutive ranks of an ep group on one node, for a dispatcher that sends rows once a node. 0: as many as
    torchrun starts on a node (LOCAL_WORLD_SIZE; `titan-moe check` takes it as --nproc-per-node, and assumes 8). A
    smaller number is useful if the links within a node differ."""
    overlap: Literal["none", "tile", "microbatch"] = "none"
    """How communication over ep overlaps with compute. Results do not depend on it.

    `none`: No overlap.
    `tile`: For use inside a node, with fused experts and a dispatcher over symmetric memory. Some thread blocks of the
    experts' GEMMs get rows from peers and put partial sums there, tile by tile, in forward and backward (COMET,
    arXiv:2502.19811).
    `microbatch`: For use between nodes, with a dispatcher of collectives. The forward of a microbatch is interleaved
    with the backward of the previous one, block by block (DualPipe without pipeline stages, arXiv:2412.19437). Weight
    gradients of fused experts are delayed until the gradients of rows are sent. Needs `accumulate_unsharded`, at least
    two microbatches a step and the default model class. Keeps the activations of little more than one microbatch. With
    pp it merges forwards and backwards of a rank, for the schedules `dualpipev` (no other changes), `interleaved_1f1b`
    (one more microbatch of a stage in flight; arXiv:2603.07685) and `1f1b` (twice as many microbatches in flight). The
    bubble does not change if stages take equal time.
    """
    expert_rank_capacity_factor: float | Literal["auto"] = "auto"
    """Capacity of a rank for rows and expert slots, relative to a balanced load, for a dispatcher that can be bounded.
    No token is dropped: a step that exceeds the capacity is repeated without the bound, and counted in the metrics. If
    experts are fused and an ep group shares memory, the capacity is that of all layers together, for what backward
    needs (the arena); otherwise it is that of each layer. "auto" follows the need of past steps, with a margin, up to
    what memory holds; the first steps run without a bound. A number is a fixed bound. 0 allocates the worst case."""
    expert_layer_capacity_factor: float = 0.0
    """The same of each layer, where the former is that of all layers together: room for the temporaries of one layer,
    in forward and backward, relative to a balanced load. A step in which a layer exceeds it is repeated, with each
    layer's tokens in pieces that fit in any case, which is slower. In pieces are also validation, forwards that count
    the load of a batch ahead, and steps of "auto" without a bound: the first ones, and those after many overflows. At
    the fourth overflow of a layer in 50 steps the factor is doubled if memory has room, else the bound is lifted, and
    the run says so; of fewer tells the metric `rerun_steps` alone. 2 needs a quarter of the room of the worst case with
    8 ranks of ep and as many choices as experts of a rank. 0, or a factor beyond it, allocates the worst case, all rows
    of the ep group on one rank."""
    expert_clones: Literal["off", "auto"] = "off"
    """Clone hot experts onto ranks with a lower load, which then compute some of their tokens (Megatron's ECHO).
    Results stay exact.

    `off`: No clones.
    `auto`: Up to 2 replica slots of a rank, in use only while the ranks of recent steps are imbalanced enough. Then
    experts are cloned for every exchange in which a rank has more than 1.05 times the mean load and exceeds it by more
    slots than a clone costs. A rank receives up to as many experts of a layer in forward as it has replica slots, and
    sends as many gradients in backward. It means "off", and `titan-moe check` says so, without shared memory in an ep
    group; with microbatches that are small or in flight together; with experts that are sharded, recomputed or not
    cast to precision.compute; and without a capacity bound.
    """
    reshard_after_forward: bool = True
    """Free the gathered dense parameters of a block after its forward, and gather them again in backward. `false` needs
    more memory and saves one all-gather a block."""
    reshard_experts_after_forward: bool = True
    """The same for the gathered experts of a block. It has no effect with edp = 1, where nothing is gathered: experts
    are cast to precision.compute, and the copies of all layers are kept until their backward, unless memory.recompute
    makes them again; in a pipeline they are kept for the step."""
    accumulate_unsharded: bool = False
    """Gather parameters in the first microbatch of a step and reduce gradients in the last one (no_sync), instead of
    two gathers and one reduction a microbatch. Nothing is resharded after forward then. Every rank holds unsharded
    parameters in precision.compute and unsharded gradients in precision.reduce, in which microbatches are summed. This
    saves communication, and on a single rank copies. Unsharded experts (edp = 1) are cast once a step instead of once a
    use; their gradients are always summed in the dtype of precision.gradients."""

    @property
    def length_multiple(self) -> int:
        """The number that must divide sequence lengths: cp and tp ranks have equal parts, in two chunks unless
        `ulysses`."""
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
    def has_clones(self) -> bool:
        """Whether ranks have replica slots, unless `config/clones.py` finds a reason against them."""
        return self.expert_clones == "auto"

    def num_clones(self, num_experts: int) -> int:
        """The number of replica slots of a rank for so many experts of a layer."""
        return min(NUM_CLONES, max(num_experts // self.ep // 2, 1)) if self.has_clones else 0

    def bounds_layers_of(self, num_experts: int, top_k: int) -> bool:
        """Whether `expert_layer_capacity_factor` is less than the worst case of a layer: all choices of a token that
        can be experts of one rank, of all tokens."""
        most_choices = min(top_k, num_experts // self.ep + self.num_clones(num_experts))
        return 0 < self.expert_layer_capacity_factor * top_k < self.ep * most_choices

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
        are summed in the dtype that the optimizer reads, which is as fine as that of the reduction or was asked for."""
        is_fine = BYTES_OF_DTYPE[precision.reduce] <= BYTES_OF_DTYPE[precision.gradients_dtype]
        return self.edp * self.dp_replicate == 1 and (is_fine or precision.gradients != "master")


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
    """The number of ranks of a node, from torchrun's environment or `check --nproc-per-node`. Without it a run has all
    ranks on one node, and a plan as many as are assumed.

    Ranks of an ep group are among ep * etp consecutive ones, so a group is on one node if that divides this number.
    """
    if of_node := _stated_ranks_of_a_node():
        return of_node
    return min(world_size, ASSUMED_RANKS_OF_A_NODE) if _IS_PLAN.get() else world_size


def assumes_nodes(world_size: int) -> bool:
    """Whether the number of ranks of a node is assumed, and there are several nodes by it."""
    return _IS_PLAN.get() and not _stated_ranks_of_a_node() and world_size > ASSUMED_RANKS_OF_A_NODE


@contextmanager
def planning(is_plan: bool = True) -> Iterator[None]:
    """Take ranks for those of other machines: where nothing else is said, a node has 8."""
    token = _IS_PLAN.set(is_plan)
    try:
        yield
    finally:
        _IS_PLAN.reset(token)


def _stated_ranks_of_a_node() -> int:
    """0 if nothing is said."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdigit() else 0


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
