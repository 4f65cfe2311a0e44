"""Roofline: the minimal work of each part of a step on one rank, and the minimal time of a device for it.

FLOPs follow `plan.cost.count`: forward and backward, causal attention halved, nothing recomputed. Routing is assumed
to be random and even. Norms, softmax and other passes over activations are left out, and so are the collectives of
tensor parallelism within layers: a lower bound, not a prediction.
"""

from dataclasses import dataclass
from typing import get_args

from titan_moe.config.modules import Region, modules_of
from titan_moe.config.optimizers import OPTIMIZERS
from titan_moe.config.parallel import resolve
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe, counts_ahead, num_microbatches, sums_replicas_once
from titan_moe.config.trainable import passes_of
from titan_moe.plan.choice.hardware import Hardware
from titan_moe.plan.cost import muon, replicated_grads
from titan_moe.plan.cost.count import attention_core_flops_per_token
from titan_moe.plan.cost.links import rows_sent
from titan_moe.plan.cost.memory import bytes_of_average, experts_per_rank, trained_experts_per_rank, trained_of
from titan_moe.plan.pipeline.parts import RankPart, parts_of


@dataclass(frozen=True)
class RegionWork:
    """The work of a part in one optimizer step on one rank."""

    flops: float = 0.0
    memory_bytes: float = 0.0  # read and written
    wire_bytes: float = 0.0  # received from other ranks

    def floor_ms(self, hardware: Hardware) -> float:
        """The time of the scarcest resource alone."""
        seconds = (
            self.flops / hardware.bf16_flops,
            self.memory_bytes / hardware.memory_bytes_per_second,
            self.wire_bytes / hardware.link_bytes_per_second,
        )
        return 1e3 * max(seconds)


def step_work(recipe: Recipe, world_size: int, pp_rank: int = 0) -> dict[str, RegionWork]:
    """The work of each part where it is known, by the names of the trace's regions; of a pipeline on one of its
    ranks."""
    part = parts_of(recipe, world_size)[pp_rank]
    recipe, world_size = part.recipe, part.world_size
    m, t = recipe.model, recipe.train
    sizes = resolve(recipe.parallel, world_size)
    # of a rank between layers; inside layers tp and ulysses have all tokens, and a part of the widths
    num_tokens = t.global_batch_sequences * t.seq_len_tokens // (sizes.dp * sizes.cp * sizes.tp)
    flops = dict.fromkeys(get_args(Region), 0)
    passes = passes_of(m, recipe.optim.trainable, follows=not part.has_embedding)
    for module in part.count.modules:
        for layer in (None,) if module.layers is None else module.layers:
            of_input, share = passes[module.path, layer]
            # two FLOPs of a multiply-add in forward, and for each gradient
            flops[module.region] += round(2 * (1 + of_input + share) * num_tokens * module.multiply_adds)
            if module.pair_width and layer is not None:
                core = attention_core_flops_per_token(m, t.seq_len_tokens, [layer])
                flops["attention"] += num_tokens * core * (1 + 2 * of_input) // 3
    work = {part: RegionWork(flops=count) for part, count in flops.items()}
    work["attention"] = RegionWork(flops["attention"], wire_bytes=exchanged_bytes(recipe, num_tokens))
    row_bytes = m.expert_width * BYTES_OF_DTYPE[recipe.precision.compute]
    # 2: the gradient of a row is sent too
    rows, etp = 2 * m.num_moe_layers * num_tokens * row_bytes, recipe.parallel.etp
    gathered = rows * (etp - 1)  # those of an etp group; as many results are reduce-scattered
    moved = rows * etp * rows_sent(recipe, world_size).all
    if recipe.parallel.overlap == "tile":  # the experts' GEMMs move the rows
        work["experts"] = RegionWork(flops=flops["experts"], wire_bytes=2 * moved)
        moved = 0.0
    work["dispatch"] = work["combine"] = RegionWork(wire_bytes=gathered + moved)
    work["clip"], work["optimizer"] = update_work(part)
    sharding = sharding_bytes(part) + replicated_grads.received_bytes(part)
    work["sharding"] = RegionWork(memory_bytes=replicated_grads.copied_bytes(part), wire_bytes=sharding)
    return {part: done for part, done in work.items() if done != RegionWork()}


def update_work(part: RankPart) -> tuple[RegionWork, RegionWork]:
    """The work of norm and clipping, and of the optimizer: passes over memory, and the products of Muon.

    The norm reads the gradients. Clipping reads and writes them, unless the optimizer's kernel clips. AdamW reads
    parameter, gradient and two moments and writes all but the gradient. Muon has one moment of its matrices. An average
    of the weights is read and written, and reads them.
    """
    recipe, held, precision = part.recipe, trained_of(part), part.recipe.precision
    master, gradient = BYTES_OF_DTYPE[precision.master], BYTES_OF_DTYPE[precision.gradients_dtype]
    clips_in_a_pass = recipe.optim.max_grad_norm > 0 and not OPTIMIZERS[recipe.optim.kind].clips_as_it_reads
    clip = RegionWork(memory_bytes=held * gradient * (3 if clips_in_a_pass else 1))
    moved = held * (2 * master + gradient + 2 * precision.bytes_of_moments)
    moved -= muon.muon_parameters(part) * precision.bytes_of_moments
    if average := bytes_of_average(recipe):
        moved += held * (2 * average + master)
    return clip, RegionWork(muon.update_flops(part), moved, muon.exchanged_bytes(part))


def exchanged_bytes(recipe: Recipe, num_tokens: int) -> float:
    """Count the bytes that attention layers receive from other cp ranks for the tokens that a rank has between layers:
    queries, keys, values and results, or latents (parallel/context.py). Gradients take the same ways back; with `ring`
    they go round behind keys and values, which are sent twice, and are in fp32; QK-clip sends keys once more."""
    compute = BYTES_OF_DTYPE[recipe.precision.compute]
    both_ways = 2.0 * compute
    if recipe.parallel.cp_kind == "ring":
        both_ways += max(compute, BYTES_OF_DTYPE["fp32"]) + recipe.optim.qk_clip.is_used * compute / 2
    modules = modules_of(recipe.model, recipe.parallel)
    return num_tokens * sum(module.number * module.received for module in modules) * both_ways


def sharding_bytes(part: RankPart) -> float:
    """Count the bytes that FSDP sends a rank in a step."""
    return sum(sharding_by_group(part))


def sharding_by_group(part: RankPart) -> tuple[float, float]:
    """Count the same of dense parameters and of experts: gathered parameters, reduced gradients, sums over replicas.

    Every microbatch gathers parameters for forward, again for backward if they were resharded, and reduces its
    gradients; with `accumulate_unsharded` the first microbatch gathers and the last reduces. Replicas sum as
    often, or once. Forwards that count ahead gather each time, or once where they are not resharded.
    """
    recipe, p = part.recipe, part.recipe.parallel
    sizes = resolve(p, part.world_size)
    gathered, summed = (BYTES_OF_DTYPE[dtype] for dtype in (recipe.precision.compute, recipe.precision.reduce))
    times = 1 if p.accumulate_unsharded else num_microbatches(recipe, part.world_size)
    times_of_replicas = 1 if sums_replicas_once(recipe) else times
    ahead = float(counts_ahead(recipe, part.world_size))

    def gathers(reshards: bool) -> float:
        is_resharded = reshards and not p.accumulate_unsharded
        return 1 + is_resharded + ahead * (1.0 if is_resharded else 1 / max(times, 1))

    whole = [module for module in part.count.modules if module.layers is None]
    root = sum(module.own_parameters for module in whole)
    trained_root = sum(part.count.num_trained(module) * module.own_parameters for module in whole)
    blocks, trained_blocks = part.count.dense_of_a_rank - root, part.count.trained_dense_of_a_rank - trained_root
    groups = (  # parameters, those that train, gathers a microbatch, ranks that share them
        (root, trained_root, 1, sizes.fsdp),
        (blocks, trained_blocks, gathers(p.reshard_after_forward), sizes.fsdp),
        (
            experts_per_rank(recipe),
            trained_experts_per_rank(recipe),
            gathers(p.reshard_experts_after_forward),
            sizes.edp,
        ),
    )
    of_root, of_blocks, of_experts = (
        times * (1 - 1 / num_ranks) * (size * num_gathers * gathered + trained * summed)
        + times_of_replicas * 2 * trained / num_ranks * (1 - 1 / sizes.dp_replicate) * summed
        for size, trained, num_gathers, num_ranks in groups
    )
    return of_root + of_blocks, of_experts
