"""Rules of the two meshes: which sizes can be laid over the ranks of a run."""

from collections.abc import Iterator

from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import ranks_of_a_node, smallest_world
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
    if leaves_a_rest(expert_ranks, world_size) and world_size == 1:
        yield (
            f"parallel.pp * dp_replicate * ep * etp = {expert_ranks}, and this is 1 rank alone; start as many with "
            f"--nproc {smallest_world(p)}, or a multiple"
        )
    elif leaves_a_rest(expert_ranks, world_size):
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
            'take "alltoall", "allgather" or "symm_mem", or ep = 1'
        )


def _overlap_has_messages(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.overlap != "none" and p.dispatcher == "local":
        yield (
            f'parallel.overlap = "{p.overlap}" hides messages, and parallel.dispatcher = "local" sends none; set it to '
            '"none", or spread the experts with "alltoall", "allgather" or "symm_mem"'
        )


def _tiles_fetch_rows(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.overlap != "tile":
        return
    setting = 'parallel.overlap = "tile"'
    if p.dispatcher not in ("symm_mem", "local"):
        yield (
            f'{setting} reads rows out of shared memory, and parallel.dispatcher = "{p.dispatcher}" has none; take '
            '"symm_mem", or overlap = "none"'
        )
    is_left_to_auto = recipe.perf.kernels == "auto" and recipe.perf.override.experts == "no"
    if recipe.perf.chosen_kernels.experts != "fused" and not is_left_to_auto:
        yield (
            f"{setting} lets the GEMMs of fused experts move rows, and perf.kernels chose "
            f'"{recipe.perf.chosen_kernels.experts}" for experts; take "fused", or overlap = "none"'
        )
    for need in recipe.model.moe.unmet_needs_of_fused:
        yield f'{setting} needs fused experts, which need {need}; take overlap = "none"'
    if p.expert_clones and recipe.compile.regional != "off" and recipe.compile.extent == "block":
        yield (
            f'{setting} with parallel.expert_clones needs compile.extent = "pieces": nothing in the graph of a block '
            "would keep clones' weights behind the plan of their rows"
        )


def _symm_mem_has_gpus(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.parallel.dispatcher == "symm_mem" and recipe.run.device == "cpu":
        yield (
            'parallel.dispatcher = "symm_mem" does not exist with run.device = "cpu"; take "alltoall" or "allgather", '
            'or run.device = "cuda"'
        )


def _symm_mem_has_peers(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.dispatcher == "symm_mem" and p.ep <= 1:
        yield (
            f'parallel.dispatcher = "symm_mem" shares memory between the ranks of an ep group, and parallel.ep = '
            f'{p.ep} leaves each alone; take "local", or a larger ep'
        )


def _symm_mem_stays_on_a_node(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, num_local = recipe.parallel, ranks_of_a_node(world_size)
    if p.dispatcher == "symm_mem" and world_size > 1 and leaves_a_rest(p.ep, num_local):
        yield (
            f"parallel.ep = {p.ep} does not divide the {num_local} ranks of a node, which parallel.dispatcher = "
            f'"symm_mem" needs; take a divisor of it ({divisors(num_local)}), or "alltoall"'
        )


def _interleaved_microbatches_can_be_cut(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, train = recipe.parallel, recipe.train
    if p.overlap != "microbatch":
        return
    setting = 'parallel.overlap = "microbatch"'
    way_out = 'parallel.overlap = "none"'
    if p.dispatcher == "symm_mem":
        yield (
            f'{setting} interleaves collectives of NCCL or gloo, and parallel.dispatcher = "symm_mem" has none; take '
            'overlap = "tile", which hides its rows, or "alltoall" or "allgather"'
        )
    if not p.accumulate_unsharded:
        yield (
            f"{setting} runs two microbatches on the same gathered parameters; set parallel.accumulate_unsharded = true,"
            f" or take {way_out}"
        )
    if recipe.compile.regional != "off" and recipe.compile.extent == "block":
        yield f'{setting} runs blocks in pieces; take compile.extent = "pieces", or {way_out}'
    if recipe.memory.recompute == "block":
        yield f'{setting} runs blocks in pieces; take memory.recompute = "experts" or "none", or {way_out}'
    if recipe.model.class_ != ModelConfig.class_:
        yield (
            f'{setting} knows the pieces of "{ModelConfig.class_}" alone, and model.class = "{recipe.model.class_}"; '
            f"take {way_out}"
        )
    sequences = train.micro_batch_sequences * (world_size // max(p.pp * p.cp * p.tp, 1))
    if 0 < train.global_batch_sequences < 2 * sequences:
        yield (
            f"{setting} needs two microbatches a step or more, and train.global_batch_sequences = "
            f"{train.global_batch_sequences} is one of {sequences} over all ranks; take {2 * sequences} or more, or "
            "fewer train.micro_batch_sequences"
        )


def _bound_has_a_dispatcher(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    factor = p.expert_rank_capacity_factor
    if factor != 0 and p.dispatcher not in ("allgather", "symm_mem"):
        yield (
            f"parallel.expert_rank_capacity_factor = {factor:g} bounds nothing with parallel.dispatcher = "
            f'"{p.dispatcher}", whose slots are exact; set it to 0, or take "allgather" or "symm_mem"'
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
            '"alltoall", "allgather" or "symm_mem"'
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
    widths = {key: width, **({"moe.ffn_hidden_size": model.moe.ffn_hidden_size} if model.moe.expert_mlp_bias else {})}
    for key, width in widths.items():
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
    Rule("tiles fetch rows", _tiles_fetch_rows, "what moves rows is inside a GEMM, which must be ours"),
    Rule("symm_mem has GPUs", _symm_mem_has_gpus, "the memory that it shares is CUDA's"),
    Rule("symm_mem has peers", _symm_mem_has_peers, "there is nobody to share memory with"),
    Rule(
        "symm_mem stays on a node",
        _symm_mem_stays_on_a_node,
        "a GPU reaches the memory of another in its own node only",
    ),
    Rule(
        "microbatches that interleave can be cut",
        _interleaved_microbatches_can_be_cut,
        "the forward of one runs between the pieces of the other's backward, past the hooks of FSDP",
    ),
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
        "FSDP shards each expert over edp along this width, its gate_up_bias along the hidden one, in equal parts",
    ),
    Rule("microbatches divide the global batch", _batch_divides, "every rank makes the same number of equal passes"),
    Rule(
        "microbatches divide the validation",
        _validation_divides,
        "a rank with fewer passes would leave the others waiting",
    ),
]
