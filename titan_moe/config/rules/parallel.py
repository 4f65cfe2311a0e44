"""Rules of the two meshes, the dispatcher and the overlap."""

import math
from collections.abc import Iterator
from operator import attrgetter

from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import ParallelConfig, ep_ranks_of_a_node, ranks_of_a_node, smallest_world
from titan_moe.config.recipe import Recipe, expert_hidden_size
from titan_moe.config.rules.perf import multiple_of_expert_rows
from titan_moe.config.rules.rule import (
    dispatchers_for,
    divisors,
    inner_divisors,
    is_no_divisor,
    key_of_kernel,
    nearest_multiples,
    rule,
    rules_in,
)
from titan_moe.config.schema import either

ALIGNED_WIDTH = 16
"""Elements of which a width is a multiple in a way out; grouped_mm needs it in fp8, and less in wider dtypes."""
MOST_SIZES = 100_000
"""Sizes of an axis that are tried for a way out."""


@rule("dense parameters are sharded over at least one rank")
def dp_shard_is_a_size(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.parallel.dp_shard == 0:
        yield "parallel.dp_shard = 0 is not a number of ranks; take 1, or -1 for all ranks that the other axes leave"


@rule("every rank has one place in the dense mesh")
def dense_view_fills_the_world(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    others = p.pp * p.dp_replicate * p.cp * p.tp
    if p.dp_shard == -1 and is_no_divisor(others, world_size):
        yield (
            f"parallel.pp * dp_replicate * cp * tp = {p.pp} * {p.dp_replicate} * {p.cp} * {p.tp} = {others} "
            f"{_does_not_divide(p, world_size)}"
        )
    if p.dp_shard > 0 and others * p.dp_shard != world_size:
        yield (
            f"parallel.pp * dp_replicate * dp_shard * cp * tp = {p.pp} * {p.dp_replicate} * {p.dp_shard} * {p.cp} * "
            f"{p.tp} = {others * p.dp_shard}, but the run has {world_size} ranks; dp_shard = -1 takes the rest"
        )


@rule("edp is the number of ranks divided by pp * dp_replicate * ep * etp")
def expert_view_divides_the_world(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    expert_ranks = p.pp * p.dp_replicate * p.ep * p.etp
    if is_no_divisor(expert_ranks, world_size):
        yield (
            f"parallel.pp * dp_replicate * ep * etp = {p.pp} * {p.dp_replicate} * {p.ep} * {p.etp} = {expert_ranks} "
            f"{_does_not_divide(p, world_size)}"
        )


def _does_not_divide(p: ParallelConfig, world_size: int) -> str:
    """The rule that the axes of a view break, with the ways out: more ranks, where there are too few for the layout."""
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    if world_size < smallest_world(p):
        return f"does not divide the {ranks}; start it with --nproc {smallest_world(p)}, or a multiple"
    return f"does not divide the {ranks}; the divisors are {divisors(world_size)}"


@rule("each rank of an ep group holds the same number of experts")
def ep_divides_experts(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, num_experts = recipe.parallel, recipe.model.moe.num_experts
    if num_experts > 0 and is_no_divisor(p.ep, num_experts):
        ranks_of_a_replica = max(world_size // max(p.pp * p.dp_replicate * p.etp, 1), 1)
        yield (
            f"parallel.ep = {p.ep} does not divide model.moe.num_experts = {num_experts}; "
            f"the divisors that fit {world_size} ranks are {divisors(num_experts, ranks_of_a_replica)}"
        )


@rule("each rank of an etp group has an equal part of every expert")
def etp_divides_expert_hidden_width(recipe: Recipe, world_size: int) -> Iterator[str]:
    etp, hidden = recipe.parallel.etp, recipe.model.moe.ffn_hidden_size
    if hidden > 0 and is_no_divisor(etp, hidden):
        yield (
            f"parallel.etp = {etp} does not divide model.moe.ffn_hidden_size = {hidden}; take "
            f"{nearest_multiples(hidden, multiple_of_expert_rows(recipe) * etp)}, or an etp that divides it"
        )


@rule("ep and etp shard experts only")
def ep_needs_experts(recipe: Recipe, world_size: int) -> Iterator[str]:
    for axis in ("ep", "etp"):
        size = getattr(recipe.parallel, axis)
        if size > 1 and recipe.model.num_moe_layers <= 0:
            yield f"parallel.{axis} = {size} needs layers with experts, and this model has none; set {axis} = 1"


@rule("rows must reach experts on other ranks")
def ep_needs_a_dispatcher_that_moves_rows(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.ep > 1 and not p.facts.moves_rows:
        yield (
            f'parallel.dispatcher = "{p.dispatcher}" moves no rows, but parallel.ep = {p.ep} spreads the experts over '
            f"ranks; take {dispatchers_for(recipe, world_size, lambda facts: facts.moves_rows)}, or ep = 1"
        )


@rule("an option without effect hides a mistake")
def overlap_has_communication(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.overlap != "none" and not p.facts.moves_rows:
        others = dispatchers_for(recipe, world_size, lambda facts: p.overlap in facts.overlaps)
        yield (
            f'parallel.overlap = "{p.overlap}" hides communication over ep, and parallel.dispatcher = "{p.dispatcher}" '
            f'has none; set it to "none"{f", or spread the experts with {others}" if others else ""}'
        )


@rule("tile needs shared memory, microbatch needs asynchronous collectives")
def dispatcher_supports_overlap(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.overlap != "none" and p.facts.moves_rows and p.overlap not in p.facts.overlaps:
        supported = either((*p.facts.overlaps, "none"))
        others = dispatchers_for(recipe, world_size, lambda facts: p.overlap in facts.overlaps)
        yield (
            f'parallel.overlap = "{p.overlap}" is not supported by parallel.dispatcher = "{p.dispatcher}"; take '
            f"overlap = {supported}{f', or {others}' if others else ''}"
        )


@rule("the thread blocks that move rows belong to our own GEMMs")
def tile_overlap_needs_fused_experts(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.overlap != "tile":
        return
    setting = 'parallel.overlap = "tile"'
    is_left_to_auto = recipe.perf.kernels == "auto" and recipe.perf.override.experts == "no"
    if recipe.perf.chosen_kernels.experts != "fused" and not is_left_to_auto:
        yield (
            f"{setting} moves rows in the GEMMs of fused experts, but {key_of_kernel(recipe, 'experts')} chooses "
            f'"{recipe.perf.chosen_kernels.experts}" for experts; take "fused", or overlap = "none"'
        )
    for need in recipe.model.moe.unmet_needs_of_fused:
        yield f'{setting} needs fused experts, which need {need}; take overlap = "none"'


@rule("the kernels of this dispatcher need GPUs")
def dispatcher_has_its_device(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.facts.needs_cuda and recipe.run.device == "cpu":
        yield (
            f'parallel.dispatcher = "{p.dispatcher}" does not exist with run.device = "cpu"; take '
            f'{dispatchers_for(recipe, world_size, lambda facts: facts.moves_rows)}, or run.device = "cuda"'
        )


@rule("a single rank has no peers")
def shared_memory_has_peers(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.facts.shares_memory and p.ep <= 1:
        others = dispatchers_for(recipe, world_size, lambda facts: not facts.shares_memory)
        yield (
            f'parallel.dispatcher = "{p.dispatcher}" shares memory between the ranks of an ep group, but parallel.ep = '
            f"{p.ep} leaves one rank in each; take {others}, or a larger ep"
        )


@rule("GPUs share memory inside a node only")
def ep_group_stays_on_a_node(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, num_local = recipe.parallel, ranks_of_a_node(world_size)
    if p.facts.is_one_node and world_size >= smallest_world(p) and is_no_divisor(p.ep * p.etp, num_local):
        size = f"parallel.ep = {p.ep}" if p.etp == 1 else f"parallel.ep * etp = {p.ep} * {p.etp} = {p.ep * p.etp}"
        yield (
            f"{size} does not divide the {num_local} ranks of a node, which parallel.dispatcher = "
            f'"{p.dispatcher}" needs; take a divisor of it ({divisors(num_local)}), or '
            f"{dispatchers_for(recipe, world_size, lambda facts: facts.moves_rows and not facts.is_one_node)}"
        )


@rule("a row is sent once to each node, and forwarded within the node")
def ep_group_has_nodes(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.ep_ranks_per_node and not p.facts.has_two_levels:
        others = dispatchers_for(recipe, world_size, lambda facts: facts.has_two_levels)
        yield (
            f"parallel.ep_ranks_per_node = {p.ep_ranks_per_node} has no effect with parallel.dispatcher = "
            f'"{p.dispatcher}"; set it to 0{f", or take {others}" if others else ""}'
        )
    if not p.facts.has_two_levels or p.ep_ranks_per_node < 0:
        return
    of_node, on_host = ep_ranks_of_a_node(p, world_size), ranks_of_a_node(world_size)
    sizes = inner_divisors(p.ep, max(on_host // max(p.etp, 1), 1))
    take = f"take {sizes}, or" if sizes else "take"
    setting = f'parallel.dispatcher = "{p.dispatcher}" needs an ep group of several nodes with several ranks each'
    if of_node >= p.ep:
        ranks = "1 rank on a node holds" if of_node == 1 else f"{of_node} ranks on a node hold"
        have = (lambda facts: facts.sends == "once_a_rank") if p.ep > 1 else (lambda facts: not facts.shares_memory)
        yield (
            f"{setting}, but {ranks} all of parallel.ep = {p.ep}; take "
            f"{dispatchers_for(recipe, world_size, have)} within a node, or "
            "name the ranks of a node if there are fewer: --nproc-per-node of `check`, or parallel.ep_ranks_per_node"
        )
    elif of_node == 1:
        yield f"{setting}, but each node has 1 rank; take {_any_network(recipe, world_size)}, which sends the same rows"
    elif is_no_divisor(of_node, p.ep):
        yield (
            f"{of_node} ranks on a node (parallel.ep_ranks_per_node, or torchrun's) do not divide parallel.ep = "
            f"{p.ep}; {take} {_any_network(recipe, world_size)}, which does not need equal nodes"
        )
    elif is_no_divisor(of_node * p.etp, on_host):
        times_etp = f" * etp = {of_node} * {p.etp}" if p.etp > 1 else f" = {of_node}"
        yield (
            f"parallel.ep_ranks_per_node{times_etp} does not divide the {on_host} ranks that torchrun starts on a "
            f"node, so some of these groups would span two nodes; {take} {_any_network(recipe, world_size)}"
        )


def _any_network(recipe: Recipe, world_size: int) -> str:
    """The dispatchers that send a row once to each rank, over any network."""
    return dispatchers_for(recipe, world_size, lambda facts: facts.sends == "once_a_rank" and not facts.is_one_node)


@rule("the forward of one microbatch runs between the pieces of another's backward, without the hooks of FSDP")
def interleaved_microbatches_run_in_pieces(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, train = recipe.parallel, recipe.train
    if p.overlap != "microbatch":
        return
    setting = 'parallel.overlap = "microbatch"'
    way_out = 'parallel.overlap = "none"'
    if not p.accumulate_unsharded:
        yield (
            f"{setting} runs two microbatches on the same gathered parameters; set parallel.accumulate_unsharded = "
            f"true, or take {way_out}"
        )
    if recipe.memory.recompute == "block":
        yield f'{setting} runs blocks in pieces; take memory.recompute = "experts" or "none", or {way_out}'
    if recipe.model.class_ != ModelConfig.class_:
        yield (
            f'{setting} supports blocks of "{ModelConfig.class_}" only, but model.class = "{recipe.model.class_}"; '
            f"take {way_out}"
        )
    sequences = train.micro_batch_sequences * (world_size // max(p.pp * p.cp * p.tp, 1))
    if 0 < train.global_batch_sequences < 2 * sequences:
        yield (
            f"{setting} needs at least two microbatches a step, but train.global_batch_sequences = "
            f"{train.global_batch_sequences} is one microbatch, of {sequences} sequences over all ranks; take "
            f"{2 * sequences} or more, or fewer train.micro_batch_sequences"
        )


@rule("the factor bounds sizes that depend on the routing and that the host does not read")
def capacity_factor_fits_the_dispatcher(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, factor = recipe.parallel, recipe.parallel.fixed_capacity_factor
    if factor != 0 and not p.facts.can_be_bounded:
        others = dispatchers_for(
            recipe, world_size, lambda facts: facts.can_be_bounded and (p.ep > 1 or not facts.shares_memory)
        )
        yield (
            f"parallel.expert_rank_capacity_factor = {factor:g} has no effect with parallel.dispatcher = "
            f'"{p.dispatcher}", whose sizes are exact; set it to 0, or take {others}'
        )
    if 0 < factor < 1:
        yield (
            f"parallel.expert_rank_capacity_factor = {factor:g} is less than a balanced load, so every step would be "
            'repeated without the bound; take "auto", 1.25 or more, or 0 for the worst case'
        )


@rule("FSDP shards each expert along this width over edp ranks, in equal parts")
def edp_divides_expert_width(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, model = recipe.parallel, recipe.model
    edp = world_size // max(p.pp * p.dp_replicate * p.ep * p.etp, 1)
    key = "moe.latent_size" if model.moe.latent_size else "hidden_size"
    widths = {key: model.expert_width}
    if model.moe.expert_mlp_bias:
        widths["moe.ffn_hidden_size"] = expert_hidden_size(recipe)
    for key, width in widths.items():
        if model.num_moe_layers > 0 and is_no_divisor(edp, width):
            part = f" / etp = {width}" if p.etp > 1 and key == "moe.ffn_hidden_size" else f" = {width}"
            etp = p.etp if key == "moe.ffn_hidden_size" else 1
            step = math.lcm(edp, ALIGNED_WIDTH) * etp
            yield (
                f"edp = {edp} ({world_size} ranks / (parallel.pp * dp_replicate * ep * etp)) does not divide "
                f"model.{key}{part}; take {_axes_for_width(recipe, world_size, width)}model.{key} = "
                f"{nearest_multiples(width * etp, step)}"
            )


def _axes_for_width(recipe: Recipe, world_size: int, width: int) -> str:
    """The larger ep and dp_replicate with which edp divides a width, for a way out: `parallel.ep = 3, 6, or `."""
    p, num_experts = recipe.parallel, recipe.model.moe.num_experts
    if min(p.pp, p.dp_replicate, p.cp, p.tp, p.ep, p.etp) < 1:
        return ""

    def divides(num_expert_ranks: int) -> bool:
        return world_size % num_expert_ranks == 0 and width % (world_size // num_expert_ranks) == 0

    most = min(world_size, MOST_SIZES)
    replicas, dense = p.pp * p.dp_replicate * p.etp, p.pp * p.cp * p.tp
    most_ep = min(most, num_experts) if p.facts.moves_rows else 0
    eps = [n for n in range(p.ep + 1, most_ep + 1) if num_experts % n == 0 and divides(replicas * n)]
    dps = [n for n in range(p.dp_replicate + 1, most + 1) if world_size % (dense * n) == 0]
    dps = [n for n in dps if p.dp_shard == -1 and divides(p.pp * n * p.ep * p.etp)]
    axes = {"ep": eps, "dp_replicate": dps}
    return "".join(f"parallel.{axis} = {', '.join(map(str, sizes[:4]))}, or " for axis, sizes in axes.items() if sizes)


@rule("every rank runs the same number of equal microbatches")
def batch_divides(recipe: Recipe, world_size: int) -> Iterator[str]:
    yield from _sequences_divide(recipe, world_size, "train.global_batch_sequences")


@rule("a rank with fewer batches would leave the others waiting in a collective")
def validation_divides(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.validation.every_steps > 0:
        yield from _sequences_divide(recipe, world_size, "validation.num_sequences")


def _sequences_divide(recipe: Recipe, world_size: int, key: str) -> Iterator[str]:
    p, micro_batch, number = recipe.parallel, recipe.train.micro_batch_sequences, attrgetter(key)(recipe)
    dp = world_size // max(p.pp * p.cp * p.tp, 1)
    step = micro_batch * dp
    if is_no_divisor(step, number):
        yield (
            f"{key} = {number} is not a multiple of train.micro_batch_sequences * data-parallel ranks = {micro_batch} "
            f"* {dp} = {step}; take {nearest_multiples(number, step)}, or change micro_batch_sequences"
        )


PARALLEL_RULES = rules_in(globals())
