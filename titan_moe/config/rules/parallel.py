"""Rules of the two meshes, the dispatcher and the overlap."""

import math
from collections.abc import Iterator

from titan_moe.config.arena import experts_of, lacks_for_arena
from titan_moe.config.gemms import unmet_needs_of_fused
from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import ParallelConfig, ep_ranks_of_a_node, ranks_of_a_node, smallest_world
from titan_moe.config.recipe import Recipe, expert_hidden_size
from titan_moe.config.rules.perf import multiple_of_expert_rows
from titan_moe.config.rules.rule import (
    Problem,
    data_parallel_ranks,
    divides,
    is_no_divisor,
    key_of_kernel,
    product,
    row,
    rule,
    rules_in,
    said,
)
from titan_moe.config.schema import counted, value_of

ALIGNED_WIDTH = 16
"""Elements of which a width is a multiple in a way out; grouped_mm needs it in fp8, and less in wider dtypes."""


dp_shard_is_a_size = row(
    "dense parameters are sharded over at least one rank",
    lambda r: r.parallel.dp_shard == 0,
    "{parallel.dp_shard} is neither a number of ranks nor -1, for all that the other axes leave",
)


@rule("every rank has one place in the dense mesh", "parallel.pp dp_replicate dp_shard cp tp")
def dense_view_fills_the_world(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, ranks = recipe.parallel, counted(world_size, "rank")
    if p.dp_shard > 0:
        number, words = product(recipe, "pp dp_replicate dp_shard cp tp")
        if number != world_size:
            yield Problem(f"{words}, but the run has {ranks}", hint=_more_ranks(p, world_size))
    number, words = product(recipe, "pp dp_replicate cp tp")
    if p.dp_shard == -1 and is_no_divisor(number, world_size):
        yield Problem(f"{words} does not divide the {ranks}", hint=_more_ranks(p, world_size))


@rule("edp is the number of ranks divided by pp * dp_replicate * ep * etp", "parallel.ep etp dp_replicate pp")
def expert_view_divides_the_world(recipe: Recipe, world_size: int) -> Iterator[str]:
    number, words = product(recipe, "pp dp_replicate ep etp")
    if is_no_divisor(number, world_size):
        hint = _more_ranks(recipe.parallel, world_size)
        yield Problem(f"{words} does not divide the {counted(world_size, 'rank')}", hint=hint)


def _more_ranks(p: ParallelConfig, world_size: int) -> str:
    """A way out where there are too few ranks for the layout."""
    return f"--nproc {smallest_world(p)} or a multiple" if world_size < smallest_world(p) else ""


ep_divides_experts = divides(
    "each rank of an ep group holds the same number of experts", "parallel.ep", "model.moe.num_experts"
)
etp_divides_expert_hidden_width = row(
    "each rank of an etp group has an equal part of every expert",
    lambda r: is_no_divisor(r.parallel.etp, r.model.moe.ffn_hidden_size),
    "{parallel.etp} does not divide {model.moe.ffn_hidden_size}",
    steps=lambda r: [multiple_of_expert_rows(r) * r.parallel.etp],
)


@rule("ep and etp shard experts only", "parallel.ep etp model.num_dense_layers model.moe.num_experts")
def ep_needs_experts(recipe: Recipe, world_size: int) -> Iterator[str]:
    for axis in ("ep", "etp"):
        size = getattr(recipe.parallel, axis)
        if size > 1 and recipe.model.num_moe_layers <= 0:
            yield f"parallel.{axis} = {size} needs layers with experts, and this model has none"


ep_needs_a_dispatcher_that_moves_rows = row(
    "rows must reach experts on other ranks",
    lambda r: r.parallel.ep > 1 and not r.parallel.facts.moves_rows,
    "{parallel.dispatcher} moves no rows, but {parallel.ep} spreads the experts over ranks",
)
overlap_has_communication = row(
    "an option without effect hides a mistake",
    lambda r: r.parallel.overlap != "none" and not r.parallel.facts.moves_rows,
    "{parallel.overlap} hides communication over ep, and {parallel.dispatcher} has none",
    "parallel.overlap dispatcher ep",
)
dispatcher_supports_overlap = row(
    "tile needs shared memory, microbatch needs asynchronous collectives",
    lambda r: r.parallel.facts.moves_rows and r.parallel.overlap not in ("none", *r.parallel.facts.overlaps),
    "{parallel.overlap} is not supported by {parallel.dispatcher}",
)


@rule(
    "the thread blocks that move rows belong to our own GEMMs",
    "parallel.overlap perf.kernels perf.override.experts model.moe.score_on expert_mlp_bias precision.experts format",
)
def tile_overlap_needs_fused_experts(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.overlap != "tile":
        return
    setting = 'parallel.overlap = "tile"'
    is_left_to_auto = recipe.perf.kernels == "auto" and recipe.perf.override.experts == "no"
    if recipe.perf.chosen_kernels.experts != "fused" and not is_left_to_auto:
        key, experts = key_of_kernel(recipe, "experts"), recipe.perf.chosen_kernels.experts
        yield f'{setting} moves rows in the GEMMs of fused experts, but {key} chooses "{experts}" for experts'
    for need in unmet_needs_of_fused(recipe):
        yield f"{setting} needs fused experts, which need {need}"


dispatcher_has_its_device = row(
    "the kernels of this dispatcher need GPUs",
    lambda r: r.parallel.facts.needs_cuda and r.run.device == "cpu",
    "{parallel.dispatcher} does not exist with {run.device}",
)
shared_memory_has_peers = row(
    "a single rank has no peers",
    lambda r: r.parallel.facts.shares_memory and r.parallel.ep <= 1,
    "{parallel.dispatcher} shares memory between the ranks of an ep group, but {parallel.ep} leaves one rank in each",
)


@rule("GPUs share memory inside a node only", "parallel.ep etp dispatcher")
def ep_group_stays_on_a_node(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, num_local = recipe.parallel, ranks_of_a_node(world_size)
    size, words = product(recipe, "ep etp" if p.etp > 1 else "ep")
    if p.facts.is_one_node and world_size >= smallest_world(p) and is_no_divisor(size, num_local):
        says = f"{words} does not divide the {num_local} ranks of a node, which {{parallel.dispatcher}} needs"
        yield said(recipe, says)


@rule("a row is sent once to each node, and forwarded within the node", "parallel.dispatcher ep ep_ranks_per_node etp")
def ep_group_has_nodes(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.ep_ranks_per_node and not p.facts.has_two_levels:
        yield said(recipe, "{parallel.ep_ranks_per_node} has no effect with {parallel.dispatcher}")
    if not p.facts.has_two_levels or p.ep_ranks_per_node < 0:
        return
    of_node, on_host = ep_ranks_of_a_node(p, world_size), ranks_of_a_node(world_size)
    needs = said(recipe, "{parallel.dispatcher} needs an ep group of several nodes with several ranks each")
    if of_node >= p.ep:
        ranks = "1 rank on a node holds" if of_node == 1 else f"{of_node} ranks on a node hold"
        problem = f"{needs}, but {ranks} all of parallel.ep = {p.ep}"
        yield Problem(problem, hint="--nproc-per-node of `check` for nodes of fewer ranks")
    elif of_node == 1:
        yield f"{needs}, but each node has 1 rank"
    elif is_no_divisor(of_node, p.ep):
        ranks = f"{of_node} ranks on a node (parallel.ep_ranks_per_node, or torchrun's)"
        yield f"{ranks} do not divide parallel.ep = {p.ep}"
    elif is_no_divisor(of_node * p.etp, on_host):
        times_etp = f" * etp = {of_node} * {p.etp}" if p.etp > 1 else f" = {of_node}"
        spans = "so some of these groups would span two nodes"
        ranks = f"the {on_host} ranks that torchrun starts on a node, {spans}"
        yield f"parallel.ep_ranks_per_node{times_etp} does not divide {ranks}"


@rule(
    "the forward of one microbatch runs between the pieces of another's backward, without the hooks of FSDP",
    "parallel.overlap accumulate_unsharded model.class train.global_batch_sequences micro_batch_sequences",
)
def interleaved_microbatches_run_in_pieces(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, train, needs = recipe.parallel, recipe.train, 'parallel.overlap = "microbatch"'
    if p.overlap != "microbatch":
        return
    if not p.accumulate_unsharded:
        yield f"{needs} gathers parameters once for two microbatches and needs parallel.accumulate_unsharded = true"
    if recipe.model.class_ != ModelConfig.class_:
        yield said(recipe, f'{needs} supports blocks of "{ModelConfig.class_}" only, but {{model.class}}')
    sequences = train.micro_batch_sequences * data_parallel_ranks(recipe, world_size)
    if 0 < train.global_batch_sequences < 2 * sequences:
        says = f"{needs} needs at least two microbatches a step, but {{train.global_batch_sequences}} is one microbatch"
        yield Problem(said(recipe, f"{says}, of {sequences} sequences over all ranks"), steps=[2 * sequences])


@rule(
    "the factor bounds sizes that depend on the routing and that the host does not read",
    "parallel.expert_rank_capacity_factor expert_layer_capacity_factor dispatcher",
)
def capacity_factor_fits_the_dispatcher(recipe: Recipe, world_size: int) -> Iterator[str]:
    factor, key = recipe.parallel.fixed_capacity_factor, "{parallel.expert_rank_capacity_factor}"
    if factor != 0 and not recipe.parallel.facts.can_be_bounded:
        yield said(recipe, f"{key} has no effect with {{parallel.dispatcher}}, whose sizes are exact")
    if 0 < factor < 1:
        yield said(recipe, f"{key} is less than a balanced load, so every step would be repeated without the bound")
    if 0 < recipe.parallel.expert_layer_capacity_factor < 1:
        key = "{parallel.expert_layer_capacity_factor}"
        yield said(recipe, f"{key} is less than a balanced load, so every step would be repeated in pieces")


@rule(
    "the sizes of a layer are bounded apart from those of all layers only where an arena keeps their rows",
    "parallel.expert_layer_capacity_factor expert_rank_capacity_factor dispatcher ep perf.override.experts",
)
def layer_capacity_has_an_arena(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.parallel.expert_layer_capacity_factor > 0 and (lacks := lacks_for_arena(recipe, experts_of(recipe))):
        yield said(recipe, f"{{parallel.expert_layer_capacity_factor}} has no effect without an arena: {lacks}")


@rule(
    "FSDP shards each expert along this width over edp ranks, in equal parts",
    "parallel.ep dp_replicate model.hidden_size model.moe.latent_size ffn_hidden_size",
)
def edp_divides_expert_width(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, model = recipe.parallel, recipe.model
    edp = world_size // max(p.pp * p.dp_replicate * p.ep * p.etp, 1)
    key = "moe.latent_size" if model.moe.latent_size else "hidden_size"
    widths = {key: (model.expert_width, 1)}
    if model.moe.expert_mlp_bias:
        widths["moe.ffn_hidden_size"] = expert_hidden_size(recipe), p.etp
    for key, (width, etp) in widths.items():
        if model.num_moe_layers > 0 and is_no_divisor(edp, width):
            part = f" / etp = {width}" if etp > 1 else f" = {width}"
            yield Problem(
                f"edp = {edp} ({world_size} ranks / (parallel.pp * dp_replicate * ep * etp)) does not divide "
                f"model.{key}{part}",
                "parallel.ep",
                "parallel.dp_replicate",
                f"model.{key}",
                steps=[math.lcm(edp, ALIGNED_WIDTH) * etp],
            )


@rule("every rank runs the same number of equal microbatches", "train.global_batch_sequences micro_batch_sequences")
def batch_divides(recipe: Recipe, world_size: int) -> Iterator[str]:
    yield from _sequences_divide(recipe, world_size, "train.global_batch_sequences")


@rule(
    "a rank with fewer batches would leave the others waiting in a collective",
    "validation.num_sequences train.micro_batch_sequences",
)
def validation_divides(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.validation.every_steps > 0:
        yield from _sequences_divide(recipe, world_size, "validation.num_sequences")


def _sequences_divide(recipe: Recipe, world_size: int, key: str) -> Iterator[str]:
    micro_batch, number = recipe.train.micro_batch_sequences, value_of(recipe, key)
    step = micro_batch * (dp := data_parallel_ranks(recipe, world_size))
    if is_no_divisor(step, number):
        product = f"train.micro_batch_sequences * data-parallel ranks = {micro_batch} * {dp} = {step}"
        yield Problem(f"{key} = {number} is not a multiple of {product}", steps=[step])


PARALLEL_RULES = rules_in(globals())
