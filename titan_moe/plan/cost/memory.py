"""GPU memory of a run without its activations.

Functions that take a `RankPart` count one pipeline rank. Functions that take only a recipe count all of its layers;
pass `RankPart.recipe` for those of one pipeline rank.
"""

from functools import lru_cache

from titan_moe.config.clones import num_clones
from titan_moe.config.formats import FORMAT_FACTS
from titan_moe.config.gemms import count_packed_experts, has_native_experts
from titan_moe.config.model import ModelConfig
from titan_moe.config.modules import modules_of, parameters_of_an_expert
from titan_moe.config.parallel import ParallelConfig, ParallelSizes, resolve
from titan_moe.config.perf import PARKED_CHUNK_BYTES
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe, expert_hidden_size, max_batch_tokens
from titan_moe.config.recompute import recompute_of
from titan_moe.config.trainable import Patterns, num_trained, trains_all
from titan_moe.plan.cost.codes import code_bytes, stored_numbers
from titan_moe.plan.cost.loads import layer_loads
from titan_moe.plan.cost.muon import muon_parameters
from titan_moe.plan.pipeline.parts import RankPart
from titan_moe.plan.pipeline.slabs import ArenaSlabs

SCALE_BYTES = 16
"""The scales behind the codes of a row or slot in fp8 take a multiple of this (kernels/experts/fp8/packed.py)."""
INDEX_BYTES = 4
"""Of a row's slot, a slot's row and a slot's score."""
GATHERS_FROM = 2048
"""Hidden width of experts from which slots are copied before weight gradients (kernels/experts/passes.py)."""


def state_bytes(part: RankPart) -> int:
    """Count the bytes of parameters, gradients and optimizer moments that a rank keeps for the whole run, without those
    that rest on the host, and of tables of experts. Frozen parameters are in compute's dtype or codes, and that is
    all."""
    recipe, precision, trained = part.recipe, part.recipe.precision, trained_of(part)
    compute = BYTES_OF_DTYPE[precision.compute]
    kept = BYTES_OF_DTYPE[precision.master] + BYTES_OF_DTYPE[precision.gradients_dtype] + precision.bytes_of_moments
    kept += bytes_of_average(recipe)
    is_whole = trains_all(recipe.model, recipe.optim.trainable)
    frozen = 0.0 if is_whole else (parameters_of(part) - trained - _sharded_codes(part)) * compute
    frozen += code_bytes(part)
    saved = muon_parameters(part) * precision.bytes_of_moments / 2
    return round(trained * kept - saved + frozen) - parked_bytes(part) + table_bytes(recipe.model)


def table_bytes(model: ModelConfig) -> int:
    """Count the bytes of the experts of all token ids, of layers that route by them. Every rank has them whole."""
    return 4 * model.vocab_size * model.moe.top_k * len(model.moe.hash_layers)


def bytes_of_average(recipe: Recipe) -> int:
    """Bytes of the average of a trained parameter."""
    return max(BYTES_OF_DTYPE[recipe.precision.master], 4) if recipe.optim.ema_decay > 0 else 0


def _sharded_codes(part: RankPart) -> float:
    """Of `parameters_of` a rank, those that are stored as codes."""
    sizes = resolve(part.recipe.parallel, part.world_size)
    dense, of_experts = (stored_numbers(part, of_experts=of_experts) for of_experts in (False, True))
    return dense / sizes.fsdp + of_experts / sizes.edp


def parked_bytes(part: RankPart) -> int:
    """Count the bytes of a rank's states that rest on the host between optimizer steps."""
    return round(trained_of(part) * _parked_bytes_of_a_parameter(part.recipe))


def _parked_bytes_of_a_parameter(recipe: Recipe) -> float:
    parked = {
        "none": 0.0,
        "moments": recipe.precision.bytes_of_moments,
        "states": recipe.precision.bytes_of_moments + 2,
    }
    return parked[recipe.memory.park]


def window_bytes(part: RankPart) -> float:
    """Bytes of the parked states that are on the GPU at a time, while the optimizer steps: two chunks, or the two
    largest shards."""
    recipe, sizes = part.recipe, resolve(part.recipe.parallel, part.world_size)
    of_experts = (
        2 / 3 * trained_experts_per_rank(recipe) / max(recipe.model.num_moe_layers, 1) / sizes.edp
    )  # gate and up
    of_others = max(module.own_parameters for module in part.count.modules if module.region != "experts") / sizes.fsdp
    largest = max(of_experts, of_others) * _parked_bytes_of_a_parameter(recipe)
    return 2 * max(min(PARKED_CHUNK_BYTES, parked_bytes(part) / 2), largest) if largest else 0.0


def gathered_bytes(part: RankPart, *, has_gradients: bool = True) -> int:
    """Count the bytes of unsharded parameters and gradients that a rank holds during a step, beside its state.

    With `accumulate_unsharded` these are all dense parameters and the rank's share of experts; without, the parameters
    alone, of what is not resharded after forward. Unsharded experts have
    only copies in compute's dtype, or codes, of what trains. These exist for the whole step, or from a layer's forward
    to its backward: those of all layers at once, unless something is recomputed. Without `has_gradients`, as in the
    first microbatch, none are accumulated yet. What is frozen is not gathered where a rank has it whole.
    """
    recipe, p = part.recipe, part.recipe.parallel
    sizes, precision = resolve(p, part.world_size), recipe.precision
    compute, reduce = BYTES_OF_DTYPE[precision.compute], BYTES_OF_DTYPE[precision.reduce]
    trained, is_unsharded = trained_experts_per_rank(recipe), sizes.experts_are_unsharded(precision)
    copy = copied_bytes_of_a_parameter(recipe)
    if not p.accumulate_unsharded:
        again = recompute_of(recipe).of("block", "expert_weights") if p.pp == 1 else frozenset()
        number = recipe.model.num_moe_layers
        made_again = len(again.intersection(recipe.model.moe_layers))  # but those of one layer
        share = (number - max(made_again - 1, 0)) / max(number, 1)
        kept = share * trained * copy if is_unsharded else 0.0
        kept += 0.0 if p.reshard_after_forward else _gathered_dense(part, sizes) * compute
        kept += 0.0 if is_unsharded or p.reshard_experts_after_forward else _gathered_experts(part, sizes) * compute
        return round(kept) + replica_bytes_per_rank(recipe)
    of_gradients = reduce if has_gradients else 0
    gathered = _gathered_dense(part, sizes) * compute + part.count.trained_dense_of_a_rank * of_gradients
    gathered += trained * copy if is_unsharded else _gathered_experts(part, sizes) * compute + trained * of_gradients
    return round(gathered) + replica_bytes_per_rank(recipe)


def _gathered_dense(part: RankPart, sizes: ParallelSizes) -> float:
    """Dense parameters that FSDP gathers on a rank: all, or on one rank those that train."""
    if sizes.fsdp == 1:
        return part.count.trained_dense_of_a_rank
    return part.count.dense_of_a_rank - stored_numbers(part, of_experts=False)


def _gathered_experts(part: RankPart, sizes: ParallelSizes) -> float:
    """The same of experts."""
    if sizes.edp == 1:
        return trained_experts_per_rank(part.recipe)
    return experts_per_rank(part.recipe) - stored_numbers(part, of_experts=True)


def copied_bytes_of_a_parameter(recipe: Recipe) -> float:
    """Count the bytes that unsharded experts hold of a parameter beside its master: a copy in compute's dtype, where
    the master's differs, or codes for forward and for backward."""
    p, number = recipe.precision, recipe.model.num_moe_layers
    compute = BYTES_OF_DTYPE[p.compute]
    if p.compute != p.parameters:
        return compute
    return compute * count_packed_experts(recipe) / max(number, 1)  # two codes are an element of bf16


def replica_bytes_per_rank(recipe: Recipe) -> int:
    """Count the bytes of the replica slots of all layers, which are there from a layer's forward to its backward, in
    use or not."""
    num_slots, size = recipe.model.num_moe_layers * num_clones(recipe), _part_of_an_expert(recipe)
    return num_slots * size * BYTES_OF_DTYPE[recipe.precision.compute]


def shared_bytes_per_rank(recipe: Recipe) -> int:
    """Count the bytes of memory that the ranks of an ep group, or of a node of it, share.

    On each rank the memory holds the row of every token of the largest microbatch of its etp group, score gradients,
    assignments and token lists; at another time the cloned experts of a layer. Exchanged counts, a few hundred bytes,
    are left out. With a hierarchical dispatcher it holds the rows of the tokens of all nodes.
    """
    if not recipe.parallel.facts.shares_memory:
        return 0
    element, top_k = BYTES_OF_DTYPE[recipe.precision.compute], recipe.model.moe.top_k
    place = recipe.model.expert_width * element + top_k * max(element, 4) + 4
    rows = max_batch_tokens(recipe) * (recipe.parallel.ep * place + 4 * top_k)
    return max(rows, _clone_bytes(recipe)) if recipe.parallel.facts.shares_memory_of_ep else rows


def workspace_bytes(recipe: Recipe) -> int:
    """Count the bytes that the ranks of a tp group share to overlap messages with GEMMs: those of the largest message
    of a layer, in forward or backward, which is the partial sums of own tokens for two ranks. 0 without overlap."""
    p = recipe.parallel
    if not p.tp_comm_overlap or p.tp == 1:
        return 0
    num_tokens = max_batch_tokens(recipe) // max(p.etp, 1)
    width = max(recipe.model.hidden_size, recipe.model.attention.q_lora_rank)
    return 2 * num_tokens * width * BYTES_OF_DTYPE[recipe.precision.compute]


def arena_bytes_per_rank(recipe: Recipe, capacity_factor: float, slabs: ArenaSlabs | None = None) -> int:
    """Count the bytes of the arena: rows and hidden states of all MoE layers, which backward needs; on a pipeline rank
    those of all its slabs, and in its delayed slabs the gradients of results and of activations, which delayed weight
    gradients need too."""
    again, number, factor = recompute_of(recipe), recipe.model.num_moe_layers, capacity_factor
    without_rows, without_hidden = len(again.of("experts")), len(again.of("experts", "moe_act"))
    slabs = slabs or ArenaSlabs(1, number - without_rows, num_hidden_layers=number - without_hidden)
    if "block" in again.layers:  # nothing is kept: there is room for one layer
        factor, slabs = 0.0, slabs._replace(number=1, num_delayed=0)
    loads = layer_loads(recipe)._replace(num_layers=slabs.num_layers, num_hidden_layers=slabs.num_hidden_layers)
    rows, slots = loads.bounded(recipe.parallel.expert_layer_capacity_factor).room(factor)
    element, hidden = BYTES_OF_DTYPE[recipe.precision.compute], expert_hidden_size(recipe)
    row, slot = recipe.model.expert_width * element, 2 * hidden * element
    if has_native_experts(recipe):
        row, slot = packed_bytes(recipe, recipe.model.expert_width), packed_bytes(recipe, 2 * hidden)
    kept = slabs.number * (rows * row + slots * slot)
    return kept + slabs.num_delayed * (rows * row + slots * hidden * element)


def packed_bytes(recipe: Recipe, width: int) -> int:
    """Bytes of a row or slot of so many codes in the format of experts, with its scales."""
    is_blockwise = recipe.precision.format_of("experts") == "fp8_blockwise"
    num_scales = width // FORMAT_FACTS["fp8_blockwise"].native_multiple if is_blockwise else 1
    return width + -(-4 * num_scales // SCALE_BYTES) * SCALE_BYTES


def temporary_bytes_per_rank(recipe: Recipe, layer_factor: float | None = None) -> int:
    """Count the bytes of one layer's temporaries with an arena, which have room for a layer's capacity, that of the
    recipe or another, or for the worst case.

    A step that exceeds it is repeated in pieces of as many rows and slots, sums the pieces' weight gradients, and joins
    their results, and gradients of rows, to those of a microbatch.
    """
    worst, factor = layer_loads(recipe), recipe.parallel.expert_layer_capacity_factor
    loads = worst.bounded(factor if layer_factor is None else layer_factor)
    of_layer = temporary_bytes(recipe, loads.worst_rows, loads.worst_slots, is_native=has_native_experts(recipe))
    if loads == worst:
        return of_layer
    joined = max_batch_tokens(recipe) // max(recipe.parallel.etp, 1) * recipe.model.expert_width
    return of_layer + _weight_grad_bytes(recipe) + joined * BYTES_OF_DTYPE[recipe.precision.compute]


def assignment_bytes_of_pieces(recipe: Recipe) -> int:
    """Count the bytes of assignments that a layer in pieces keeps for backward, beyond a bounded layer: rows and scores
    of its slots, and slots of its rows, which over all pieces are those of the worst case. 0 without a bound."""
    if not recipe.parallel.expert_layer_capacity_factor:
        return 0
    worst = layer_loads(recipe)
    bounded = worst.bounded(recipe.parallel.expert_layer_capacity_factor)
    slots, rows = worst.worst_slots - bounded.worst_slots, worst.worst_rows - bounded.worst_rows
    return INDEX_BYTES * (2 * slots + recipe.model.moe.top_k * rows)


def bytes_beyond_a_piece(recipe: Recipe) -> int:
    """By how much the temporaries of a bounded layer exceed those of a piece, which has as many slots or rows as that,
    and fewer of the others."""
    worst = layer_loads(recipe)
    loads = worst.bounded(recipe.parallel.expert_layer_capacity_factor)
    if loads == worst:
        return 0
    share = min(loads.worst_rows / worst.worst_rows, loads.worst_slots / worst.worst_slots)
    of_piece = share * worst.worst_rows, share * worst.worst_slots
    of_layer = loads.worst_rows, loads.worst_slots
    bounded, piece = (temporary_bytes(recipe, *it, is_native=has_native_experts(recipe)) for it in (of_layer, of_piece))
    return bounded - piece


def temporary_bytes(recipe: Recipe, rows: float, slots: float, *, is_native: bool) -> int:
    """Count the bytes of the temporaries of a MoE layer's backward that has room for so many rows and slots; with
    `is_native`, in the format of experts.

    Three moments may have most. First there are the gradients of rows and of activations, the gradients of hidden
    states and the activations. Then gradients of slots, and their sums, follow those of activations; then gradients of
    weights follow these.
    """
    width, hidden = recipe.model.expert_width, expert_hidden_size(recipe)
    element = BYTES_OF_DTYPE[recipe.precision.compute]
    weights = _weight_grad_bytes(recipe)
    repeated = recompute_of(recipe)  # hidden states until gradients of rows are put, and rows
    again = 2 * hidden if repeated.of("moe_act", "experts") else 0
    rows_again = rows * width * element if "experts" in repeated.layers and not is_native else 0
    if not is_native:
        gathered = width if hidden >= GATHERS_FROM else 0
        first = (rows * width + slots * (4 * hidden + again)) * element
        second = (2 * rows * width + slots * (3 * hidden + width + again)) * element
        third = (rows * width + slots * (3 * hidden + gathered)) * element + weights
        return round(max(first, second, third) + rows_again)
    packed = rows * packed_bytes(recipe, width) + slots * (packed_bytes(recipe, again) if again else 0)
    sums = rows * width * element
    if recipe.precision.wgrad == "format":  # a factor of each product is transposed; gate and up are two thirds
        products = max(slots * (5 * hidden + width) + 2 / 3 * weights, slots * (4 * hidden + width) + weights)
        return round(packed + max(slots * 5 * hidden, slots * (3 * hidden + 2 * width) + sums, products))
    # weight gradients in bf16: rows and hidden states are unpacked, and gradients of hidden states computed again
    return round(packed + max(slots * (4 * hidden + 2 * width) + sums, slots * 14 * hidden + 2 * sums + weights))


def _weight_grad_bytes(recipe: Recipe) -> int:
    """Bytes of the weight gradients of a layer's experts."""
    of_layer = trained_experts_per_rank(recipe) / max(recipe.model.num_moe_layers, 1)
    return round(of_layer * BYTES_OF_DTYPE[recipe.precision.compute])


def _clone_bytes(recipe: Recipe) -> int:
    """Bytes of the most experts that can be cloned: all of a rank's, or as many as there are replica slots."""
    num_ranks, num_replicas, moe = recipe.parallel.ep, num_clones(recipe), recipe.model.moe
    num_cloned = max(min(moe.num_experts // num_ranks, num_ranks * num_replicas), num_replicas)
    return num_cloned * _part_of_an_expert(recipe) * BYTES_OF_DTYPE[recipe.precision.compute]


def parameters_of(part: RankPart) -> float:
    """Count the parameters of a rank's shards; gradients and moments of those that train are sharded alike.

    Dense parameters are sharded over tp, dp_shard and cp; experts over ep and etp, and inside these over edp. Replicas
    divide nothing.
    """
    sizes = resolve(part.recipe.parallel, part.world_size)
    return part.count.dense_of_a_rank / sizes.fsdp + experts_per_rank(part.recipe) / sizes.edp


def trained_of(part: RankPart) -> float:
    """Count those that train."""
    sizes = resolve(part.recipe.parallel, part.world_size)
    return part.count.trained_dense_of_a_rank / sizes.fsdp + trained_experts_per_rank(part.recipe) / sizes.edp


def trained_experts_per_rank(recipe: Recipe) -> float:
    """Count those of `experts_per_rank` that train."""
    return _experts_per_rank(recipe.model, recipe.parallel, recipe.optim.trainable)[1]


def experts_per_rank(recipe: Recipe) -> float:
    """Count the parameters of routed experts in all layers that a rank computes with: its share over ep and etp."""
    return _experts_per_rank(recipe.model, recipe.parallel, recipe.optim.trainable)[0]


@lru_cache(maxsize=4096)
def _experts_per_rank(model: ModelConfig, parallel: ParallelConfig, patterns: Patterns) -> tuple[float, float]:
    """All, and those that train."""
    modules = [module for module in modules_of(model, parallel) if module.region == "experts"]
    whole = float(sum(module.number * module.own_parameters for module in modules))
    if trains_all(model, patterns):
        return whole, whole
    return whole, sum(num_trained(module, model, patterns) * module.own_parameters for module in modules)


def _part_of_an_expert(recipe: Recipe) -> int:
    return parameters_of_an_expert(recipe.model, recipe.parallel.etp)
