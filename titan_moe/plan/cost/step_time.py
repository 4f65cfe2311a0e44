"""The time of an optimizer step by its parts: what `titan-moe check` predicts, and `plan` ranks layouts by.

Kernels by FLOPs or bytes at measured rates, messages by bytes and links, what of them nothing hides, the bubble by the
simulation of the schedule, the limit of power by the share of GEMMs. Tests hold it to measured steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from titan_moe.config.parallel import ranks_of_a_node
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe, counts_ahead
from titan_moe.config.recompute import recompute_of
from titan_moe.plan.cost import muon, replicated_grads
from titan_moe.plan.cost.block_time import GEMMS, Times, head_times, layer_times
from titan_moe.plan.cost.codes import stored_numbers
from titan_moe.plan.cost.count import training_flops_per_token
from titan_moe.plan.cost.counting_time import counting_seconds
from titan_moe.plan.cost.gemm_time import Passes
from titan_moe.plan.cost.memory import experts_per_rank, trained_experts_per_rank
from titan_moe.plan.cost.messages import link_rate, sharding_exposed, stage_seconds
from titan_moe.plan.cost.offload import copied_bytes
from titan_moe.plan.cost.rates import Rates
from titan_moe.plan.cost.roofline import sharding_by_group, update_work
from titan_moe.plan.pipeline.makespan import makespan_of
from titan_moe.plan.pipeline.parts import RankPart, part_of
from titan_moe.plan.pipeline.simulation import Times as StageTimes
from titan_moe.plan.pipeline.weight_grads import split_flops, splits_backward
from titan_moe.plan.resolved import Resolved

NATURAL_LOAD = 1.03
"""Of the busiest rank of an ep group over the mean, with natural routing (tools/results/steps.md)."""
POWER_FROM = 0.5
POWER = {"linears": 0.42, "head": 0.42, "recompute": 0.2, "experts": 0.15}
"""GEMMs that take a larger share of a step than this are slowed down by so much of the excess, by part: dense ones from
788 to 655 TFLOP/s where a GPU does nothing else; those of experts were measured in a loop, which the limit slows down
already."""
SPREAD = 0.04
"""The standard deviation of a rank's time between two exchanges of rows, over its mean: GPUs differ in clock, and
layers in load. All ranks wait for the slowest (barriers take 4.2 % of a recorded step on 4 GPUs)."""
LAUNCH, LAUNCH_OF_ROWS = 10e-3, 7e-3
"""Seconds that the host takes to launch a layer's forward and backward, and its dispatcher's."""
KERNELS, KERNELS_OF_ADAPTERS, KERNELS_OF_COMPOSED = (25, 40), (15, 37), (24, 52)
"""Some of a layer, of adapters of its attention and experts and of codes, and of the same where experts are grouped
GEMMs, in forward and backward, by the lines of kernels/linear/adapted.py, kernels/experts/adapted_fused_mlp.py and
adapted_mlp.py."""
HOST_OF_ADAPTERS = 0.45
"""The host's time of a kernel of adapters over that of a kernel of a layer, which has hooks and pieces."""
GAPS, GAPS_OF_A_GRAPH = 0.035, 0.015
"""Of a step, between launched kernels, and between those of a graph."""
CAST, ACCUMULATE_FIRST, ACCUMULATE = 6, 6, 10
"""Bytes a parameter of unsharded experts: to cast fp32, and to add gradients in bf16 into fp32."""
CODES = 11
"""To quantise a weight in bf16 for forward and backward."""
COPIES, COPIES_OF_FROZEN, SUM_OF_SHARDS = 12, 4, 12
"""Of a gathered parameter, and its gradient, in FSDP's buffers; of one without a gradient; and of a rank's shard, to
add reduced gradients of microbatches up in fp32."""
GATHERED, CAST_SHARD, REDUCED = 8, 10, 10
"""The same of sharded experts, by the passes of FSDP. They are sharded by width, not by expert, so what is gathered is
copied out and its pieces joined (2 + 2 bytes each); a shard is cast to bf16 and copied in (4 + 2, 2 + 2); gradients are
cut into the pieces of ranks (2 + 2) and cast to fp32 (2 + 4)."""
MUON_RATE, MUON_COPIES = 0.61, 15
"""Of the rate of dense GEMMs, with symmetric products by halves (0.58 and 0.69 in matrices of 768 and of 2,048 rows);
and bytes a parameter of norms and divisions. By kernels alone (tools/results/kernels.md, steps.md)."""
HOST_EXPOSED = 0.25
"""Of copies to and from the host, that takes time of kernels (tools/results/memory.md)."""


@dataclass(frozen=True)
class Prediction:
    """A step of a rank, of a pipeline its slowest."""

    seconds: float
    parts: Mapping[str, float]
    """Seconds by part; together they are the step."""
    tokens_per_second: float  # of a GPU
    mfu: float
    bubble: float
    """The share of the step."""
    rates: Rates

    @property
    def exposed_messages(self) -> float:
        """The share of the step."""
        return sum(self.parts.get(name, 0.0) for name in ("rows", "tp and cp", "sharding", "stages")) / self.seconds


def predict(resolved: Resolved, rates: Rates, load: float = 0.0, layers: Sequence[Times] | None = None) -> Prediction:
    """Predict a step. `load` is that of the busiest rank of an ep group over the mean; 0 takes what was measured.
    `layers` are the times of layers where these are known."""
    recipe, world = resolved.recipe, resolved.world_size
    layers = layer_times(recipe, world, rates, load or usual_load(recipe)) if layers is None else layers
    head = head_times(recipe, rates)
    stages = resolved.stages if recipe.parallel.pp > 1 else ((*_names(len(layers)), "head"),)
    of_stages = [
        _sum([*(layers[at] for at in _layers(stage)), *([head] if "head" in stage else [])]) for stage in stages
    ]
    number = resolved.num_microbatches
    slowest, parts, seconds, bubble = _of_microbatches(resolved, of_stages, rates, number)
    step = dict(parts)
    for name, more in _of_a_step(part_of(recipe, world, slowest), rates, number, seconds).items():
        step[name] = step.get(name, 0.0) + more
    step["idle"] = bubble
    is_counted = counts_ahead(recipe, world)
    if is_counted:
        step["counting"] = _counting(resolved, of_stages, rates, number)
    total = sum(step.values())
    step["launch"] = GAPS_OF_A_GRAPH * total
    if recipe.compile.cudagraph == "off":
        of_ranks = (_layers_of(resolved, rank) for rank in range(recipe.parallel.pp))
        host = number * max(_launched_seconds(recipe, layers, is_counted=is_counted) for layers in of_ranks)
        step["launch"] = max(GAPS * total, host - total)
    total += step["launch"]
    tokens = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens / world / recipe.run.ranks_per_gpu
    rate = tokens * recipe.run.ranks_per_gpu / total
    flops = training_flops_per_token(recipe.model, recipe.train.seq_len_tokens, recipe.optim.trainable)
    kept = {name: part for name, part in step.items() if part > 0}
    return Prediction(total, kept, rate, rate * flops / rates.peak, bubble / total, rates)


def _counting(resolved: Resolved, of_stages: Sequence[Times], rates: Rates, number: int) -> float:
    """What counting a step ahead takes, of all layers without the head."""
    p = resolved.recipe.parallel
    message = stage_seconds(resolved.recipe, resolved.world_size, rates) if p.pp > 1 else 0.0
    forwards = [
        message + sum(part.forward for name, part in times.items() if name != "head") for times in of_stages
    ]  # fmt: skip
    ranks = resolved.ranks if p.pp > 1 else [0]
    return counting_seconds(forwards, ranks, number) * (1 + SPREAD * largest_of(p.ep * p.etp))


def _launched_seconds(recipe: Recipe, layers: Sequence[int], *, is_counted: bool) -> float:
    """What the host takes for a microbatch of these layers, which may be counted ahead."""
    forward, backward = map(float, KERNELS)
    of_one = LAUNCH + LAUNCH_OF_ROWS * (recipe.parallel.ep > 1)
    if recipe.model.adapter.is_used:
        of_adapters = KERNELS_OF_ADAPTERS if recipe.perf.fuses_experts else KERNELS_OF_COMPOSED
        more = [HOST_OF_ADAPTERS * number for number in of_adapters]
        of_one *= 1 + sum(more) / (forward + backward)
        forward, backward = (a + b for a, b in zip(KERNELS, more, strict=True))
    again = len(recompute_of(recipe).of("block").intersection(layers)) + len(layers) * is_counted
    return (len(layers) + again * forward / (forward + backward)) * of_one


def usual_load(recipe: Recipe) -> float:
    """That of the busiest rank of an ep group over the mean."""
    return 1.0 if recipe.train.forces_load or recipe.parallel.ep == 1 else NATURAL_LOAD


def _of_microbatches(
    resolved: Resolved, of_stages: Sequence[Times], rates: Rates, number: int
) -> tuple[int, dict[str, float], float, float]:
    """The slowest rank, its seconds by part and in all, and the time in which it waits for others."""
    recipe, p = resolved.recipe, resolved.recipe.parallel
    ranks = [0] if p.pp == 1 else resolved.ranks
    of_ranks = [_sum([times for times, at in zip(of_stages, ranks, strict=True) if at == rank]) for rank in range(p.pp)]
    slowest = max(range(p.pp), key=lambda rank: sum(part.total for part in of_ranks[rank].values()))
    busy = {name: number * part.total for name, part in of_ranks[slowest].items()}
    seconds, makespan = sum(busy.values()), sum(busy.values())
    if p.pp > 1:
        message = stage_seconds(recipe, resolved.world_size, rates)
        makespan = _makespan(resolved, of_stages, number, message)
        busy["stages"] = 2 * message * number * max(p.vpp, 1) if makespan > seconds else 0.0
        seconds += busy["stages"]
    waits = max(makespan - seconds, 0.0)
    gemms = sum(busy.get(name, 0.0) for name in GEMMS)
    excess = max(0.0, gemms / (seconds + waits) - POWER_FROM)
    busy = {name: part * (1 + POWER.get(name, 0.0) * excess) for name, part in busy.items()}
    busy["waits"] = sum(busy.values()) * SPREAD * largest_of(p.ep * p.etp)
    return slowest, busy, sum(busy.values()), waits * (sum(busy.values()) / seconds)


@lru_cache(maxsize=64)
def largest_of(number: int) -> float:
    """The mean of the largest of so many normal variates, by Blom's formula."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25)) if number > 1 else 0.0


def _makespan(resolved: Resolved, of_stages: Sequence[Times], number: int, message: float) -> float:
    """The time of a pipeline's microbatches. Of many, a few are simulated: each one more takes as long."""
    recipe, p = resolved.recipe, resolved.recipe.parallel
    shares = [0.0] * len(of_stages)
    if splits_backward(recipe):
        flops_of_stages = split_flops(recipe, resolved.stages)
        shares = [flops.backward_weight / max(flops.total - flops.forward, 1) for flops in flops_of_stages]
    forward = [sum(part.forward for part in times.values()) + message for times in of_stages]
    backward = [sum(part.total - part.forward for part in times.values()) + message for times in of_stages]
    times = StageTimes(
        forward,
        [time * (1 - share) for time, share in zip(backward, shares, strict=True)],
        [time * share for time, share in zip(backward, shares, strict=True)],
    )
    few = min(number, 2 * p.pp + number % p.pp)
    makespan = makespan_of(p, few, times)
    of_ranks = [0.0] * p.pp
    for rank, first, last in zip(resolved.ranks, forward, backward, strict=True):
        of_ranks[rank] += first + last
    return makespan + (number - few) * max(of_ranks)


def _of_a_step(part: RankPart, rates: Rates, number: int, compute: float) -> dict[str, float]:
    """What a rank does once a step, or in each microbatch beside its layers."""
    recipe, p, world = part.recipe, part.recipe.parallel, part.world_size
    sizes = (run := Resolved(part.run or recipe, world)).sizes
    of_node, of_stage = ranks_of_a_node(world), world // p.pp
    dense, experts = sharding_by_group(part)
    # what is gathered enters a node once, over the adapters of all of its ranks that the group has
    is_in_node = of_stage <= of_node
    of_dense = rates.link if is_in_node else min(rates.link, max(of_node // max(p.tp, 1), 1) * rates.node_link)
    of_experts = min(rates.link, max(of_node // (p.ep * p.etp), 1) * rates.node_link)
    of_experts = link_rate(rates, p.ep * p.etp * sizes.edp, world) if is_in_node else of_experts
    replicated = replicated_grads.received_bytes(part)
    messages = dense / of_dense + experts / of_experts + replicated / rates.link
    in_node = (dense + experts + replicated) / rates.link
    clip, update = update_work(part)
    found = {"sharding": sharding_exposed(messages, compute, in_node)}
    moved = clip.memory_bytes + update.memory_bytes + MUON_COPIES * muon.muon_parameters(part)
    found["optimizer"] = moved / rates.memory + update.flops / (MUON_RATE * rates.dense) + update.wire_bytes / of_dense
    found["passes"] = _copied_bytes(part, run, number) / rates.memory
    if copied := copied_bytes(part):
        found["offload"] = HOST_EXPOSED * 2 * copied / 31e9
    return found


def _copied_bytes(part: RankPart, run: Resolved, number: int) -> float:
    """Bytes of passes over parameters and their gradients."""
    recipe, p = part.recipe, part.recipe.parallel
    times, sizes = 1 if p.accumulate_unsharded else number, run.sizes
    trained_dense = part.count.trained_dense_of_a_rank
    frozen = part.count.dense_of_a_rank - trained_dense - stored_numbers(part, of_experts=False)
    dense = trained_dense * (COPIES * times + (ACCUMULATE * number if p.accumulate_unsharded else 0))
    dense += max(frozen, 0) * COPIES_OF_FROZEN * times if sizes.fsdp > 1 else 0
    dense += trained_dense / sizes.fsdp * SUM_OF_SHARDS * (times - 1)
    experts, trained = experts_per_rank(recipe), trained_experts_per_rank(recipe)
    if not run.experts_are_unsharded:
        frozen = max(experts - trained - stored_numbers(part, of_experts=True), 0)
        frozen = frozen if sizes.edp > 1 else 0
        gathers = 1 + (p.reshard_experts_after_forward and not p.accumulate_unsharded)
        copied = (trained + frozen) * gathers * (GATHERED + CAST_SHARD / sizes.edp) + trained * REDUCED
        copied = copied * times + trained / sizes.edp * SUM_OF_SHARDS * (times - 1)
        return dense + copied + (trained * ACCUMULATE * number if p.accumulate_unsharded else 0)
    casts = CAST if recipe.precision.compute != recipe.precision.parameters else 0
    if recipe.precision.format_of("experts") != "compute":
        casts = CODES
    added = ACCUMULATE_FIRST + ACCUMULATE * (number - 1)
    is_fp32 = BYTES_OF_DTYPE[recipe.precision.gradients_dtype] == 4
    is_freed = p.pp == 1 and not p.accumulate_unsharded  # as memory.py counts it
    again = recompute_of(recipe).of("block", "expert_weights") if is_freed else frozenset[int]()
    share = len(again.intersection(recipe.model.moe_layers)) / max(recipe.model.num_moe_layers, 1)
    return dense + trained * casts * (1 + share) * times + trained * added * (1 if is_fp32 else 0.6)


def _sum(times: Sequence[Times]) -> Times:
    found: dict[str, Passes] = {}
    for each in times:
        for name, part in each.items():
            found[name] = found[name].plus(part) if name in found else part
    return found


def _names(number: int) -> list[str]:
    return [f"layers.{layer}" for layer in range(number)]


def _layers(stage: Sequence[str]) -> list[int]:
    return [int(name.removeprefix("layers.")) for name in stage if name.startswith("layers.")]


def _layers_of(resolved: Resolved, rank: int) -> list[int]:
    if resolved.recipe.parallel.pp == 1:
        return list(range(resolved.recipe.model.num_blocks))
    return [layer for stage in resolved.stages_of_rank(rank) for layer in _layers(resolved.stages[stage])]
