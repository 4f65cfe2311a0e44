"""Rules of the two meshes: which sizes can be laid over the ranks of a run."""

from collections.abc import Iterator

from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Rule, divisors, leaves_a_rest, nearest_multiples


def _axes_work(recipe: Recipe, world_size: int) -> Iterator[str]:
    for axis in ("pp", "cp", "tp", "etp"):
        size = getattr(recipe.parallel, axis)
        if size > 1:
            yield f"parallel.{axis} = {size} does not work yet; set it to 1 and spread with dp_shard and ep"


def _dp_shard_is_a_size(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.parallel.dp_shard == 0:
        yield "parallel.dp_shard = 0 is no number of ranks; take 1 to shard nothing, or -1 for all ranks that are left"


def _dense_view_fills_the_world(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    others = p.pp * p.dp_replicate * p.cp * p.tp
    if p.dp_shard == -1 and leaves_a_rest(others, world_size):
        yield (
            f"parallel.pp * dp_replicate * cp * tp = {p.pp} * {p.dp_replicate} * {p.cp} * {p.tp} = {others} does not "
            f"divide the {world_size} ranks; the divisors are {divisors(world_size)}"
        )
    if p.dp_shard > 0 and others * p.dp_shard != world_size:
        yield (
            f"parallel.pp * dp_replicate * dp_shard * cp * tp = {p.pp} * {p.dp_replicate} * {p.dp_shard} * {p.cp} * "
            f"{p.tp} = {others * p.dp_shard}, but the run has {world_size} ranks; dp_shard = -1 takes what is left"
        )


def _expert_view_divides_the_world(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    expert_ranks = p.pp * p.dp_replicate * p.ep * p.etp
    if leaves_a_rest(expert_ranks, world_size):
        yield (
            f"parallel.pp * dp_replicate * ep * etp = {p.pp} * {p.dp_replicate} * {p.ep} * {p.etp} = {expert_ranks} "
            f"does not divide the {world_size} ranks; the divisors are {divisors(world_size)}"
        )


def _ep_divides_experts(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, num_experts = recipe.parallel, recipe.model.moe.num_experts
    if num_experts > 0 and leaves_a_rest(p.ep, num_experts):
        ranks_of_a_replica = max(world_size // max(p.pp * p.dp_replicate * p.etp, 1), 1)
        yield (
            f"parallel.ep = {p.ep} does not divide model.moe.num_experts = {num_experts}; "
            f"the divisors that fit {world_size} ranks are {divisors(num_experts, ranks_of_a_replica)}"
        )


def _ep_needs_experts(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.parallel.ep > 1 and recipe.model.num_moe_layers <= 0:
        yield f"parallel.ep = {recipe.parallel.ep} needs layers with experts, and this model has none; set ep = 1"


def _ep_needs_a_wire(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.ep > 1 and p.dispatcher == "local":
        yield (
            f'parallel.dispatcher = "local" moves nothing, but parallel.ep = {p.ep} spreads the experts over ranks; '
            'take "alltoall" or "allgather", or ep = 1'
        )


def _overlap_has_messages(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.overlap != "none" and p.dispatcher == "local":
        yield (
            f'parallel.overlap = "{p.overlap}" hides messages, and parallel.dispatcher = "local" sends none; set it to '
            '"none", or spread the experts with "alltoall" or "allgather"'
        )


def _bound_has_a_dispatcher(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    factor = p.expert_rank_capacity_factor
    if factor != 0 and p.dispatcher != "allgather":
        yield (
            f"parallel.expert_rank_capacity_factor = {factor:g} bounds nothing with parallel.dispatcher = "
            f'"{p.dispatcher}", whose slots are exact; set it to 0, or take "allgather"'
        )
    if 0 < factor < 1:
        yield (
            f"parallel.expert_rank_capacity_factor = {factor:g} is less than a balanced load, so every step would be "
            "taken twice; take 1.25 or more, or 0 for the worst case"
        )


def _clones_have_ranks(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, num_experts = recipe.parallel, recipe.model.moe.num_experts
    if p.expert_clones <= 0:
        return
    if p.ep <= 1 or p.dispatcher == "local":
        yield (
            f"parallel.expert_clones = {p.expert_clones} lends experts to other ranks, but parallel.ep = {p.ep} and "
            f'parallel.dispatcher = "{p.dispatcher}" leave them all on one; set it to 0, or spread the experts with '
            '"alltoall" or "allgather"'
        )
    elif p.expert_clones > num_experts // p.ep:
        yield (
            f"parallel.expert_clones = {p.expert_clones} exceeds the {num_experts // p.ep} experts that a rank has of "
            f"its own (model.moe.num_experts / parallel.ep = {num_experts} / {p.ep}); take 1 or 2"
        )


def _edp_divides_expert_width(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, model = recipe.parallel, recipe.model
    edp = world_size // max(p.pp * p.dp_replicate * p.ep * p.etp, 1)
    key, width = (
        ("moe.latent_size", model.moe.latent_size) if model.moe.latent_size else ("hidden_size", model.hidden_size)
    )
    if model.num_moe_layers > 0 and leaves_a_rest(edp, width):
        yield (
            f"edp = {edp} (the {world_size} ranks over parallel.pp * dp_replicate * ep * etp) does not divide "
            f"model.{key} = {width}; raise parallel.ep or parallel.dp_replicate until it does"
        )


def _batch_divides(recipe: Recipe, world_size: int) -> Iterator[str]:
    number = recipe.train.global_batch_sequences
    yield from _sequences_split_evenly(recipe, world_size, "train.global_batch_sequences", number)


def _validation_divides(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.validation.every_steps > 0:
        number = recipe.validation.num_sequences
        yield from _sequences_split_evenly(recipe, world_size, "validation.num_sequences", number)


def _sequences_split_evenly(recipe: Recipe, world_size: int, key: str, number: int) -> Iterator[str]:
    p, micro_batch = recipe.parallel, recipe.train.micro_batch_sequences
    dp = world_size // max(p.pp * p.cp * p.tp, 1)
    step = micro_batch * dp
    if leaves_a_rest(step, number):
        yield (
            f"{key} = {number} is not a multiple of train.micro_batch_sequences * data-parallel ranks = {micro_batch} "
            f"* {dp} = {step}; take {nearest_multiples(number, step)}, or change micro_batch_sequences"
        )


PARALLEL_RULES = [
    Rule("only working axes are used", _axes_work, "a silent 1 would be another run than the one asked for"),
    Rule("dp_shard is a size or -1", _dp_shard_is_a_size, "dense parameters live on at least one rank"),
    Rule("the dense view fills the world", _dense_view_fills_the_world, "every rank has one place in the dense mesh"),
    Rule(
        "the expert view divides the world",
        _expert_view_divides_the_world,
        "edp is what ep, etp, pp and dp_replicate leave of the ranks",
    ),
    Rule("ep divides num_experts", _ep_divides_experts, "each rank of an ep group holds the same number of experts"),
    Rule("ep needs experts", _ep_needs_experts, "there is nothing to spread"),
    Rule("ep needs a dispatcher that moves rows", _ep_needs_a_wire, "rows must reach experts on other ranks"),
    Rule("overlap has messages to hide", _overlap_has_messages, "a switch that does nothing hides a mistake"),
    Rule(
        "a slot bound has a dispatcher to bound",
        _bound_has_a_dispatcher,
        "it stands in for sizes that depend on the routing and that the host must not read",
    ),
    Rule(
        "clones have ranks to go to",
        _clones_have_ranks,
        "a spare slot holds an expert of another rank, and every exchange pays for it whether it is used or not",
    ),
    Rule(
        "edp divides the experts' width",
        _edp_divides_expert_width,
        "FSDP shards each expert over edp along this width, and only in equal parts",
    ),
    Rule("microbatches divide the global batch", _batch_divides, "every rank makes the same number of equal passes"),
    Rule(
        "microbatches divide the validation",
        _validation_divides,
        "a rank with fewer passes would leave the others waiting",
    ),
]
