"""What the memory pool of a CUDA graph holds beside the tensors of the stream that computes.

A pool has memory for each stream apart, which no other stream can use. FSDP gathers parameters on one stream and
allocates reduced gradients on another. Messages between pipeline stages have buffers (parallel/pipeline/messages.py).
"""

from itertools import pairwise
from typing import NamedTuple

from titan_moe.config.parallel import resolve
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import microbatch_tokens, num_microbatches
from titan_moe.plan.cost.codes import stored_numbers
from titan_moe.plan.cost.memory import experts_per_rank, trained_experts_per_rank
from titan_moe.plan.pipeline.parts import RankPart

FRAGMENTATION = 0.02
"""Of the bytes of the computing stream at their peak, what is free between its tensors (tools/results/parallel.md)."""


class Group(NamedTuple):
    """Parameters that FSDP gathers at once."""

    parameters: float
    num_ranks: int
    trained: float
    """Those whose gradients it reduces."""


Pairs = list[tuple[Group, Group]]


def gathering_bytes(part: RankPart) -> float:
    """The bytes of a pool on the stream that gathers: parameters of two groups, one after the other, and the rank's own
    share of one, if it is cast. While a block waits for its experts, the next block and its experts are gathered, so
    sharded experts are there twice. On one rank FSDP copies parameters on the computing stream."""
    return _gathering_bytes(part, _pairs_of(part))


def _gathering_bytes(part: RankPart, pairs: Pairs) -> float:
    precision, experts = part.recipe.precision, sharded_experts(part)
    is_cast = precision.compute != precision.parameters
    most = max(_gathered_elements(one, other, is_cast) for one, other in pairs)
    if experts is not None and experts.num_ranks > 1 and part.recipe.model.num_moe_layers > 1:
        blocks = (one for one, other in pairs if other == experts and one != experts and one.num_ranks > 1)
        block = max((one.parameters for one in blocks), default=0.0)
        most = max(most, 2 * (block + experts.parameters) + is_cast * experts.parameters / experts.num_ranks)
    return most * BYTES_OF_DTYPE[precision.compute]


def _gathered_elements(one: Group, other: Group, is_cast: bool) -> float:
    """Elements of two groups that are gathered after another. The second is where the share of the first was, if it has
    room there."""
    wholes = [group.parameters if group.num_ranks > 1 else 0.0 for group in (one, other)]
    shares = [is_cast * whole / group.num_ranks for whole, group in zip(wholes, (one, other), strict=True)]
    if wholes[1] + shares[1] <= shares[0]:
        return wholes[0] + shares[0]
    return sum(wholes) + max(shares)


def sharded_experts(part: RankPart) -> Group | None:
    """The experts of a layer where FSDP has them; one rank has what is frozen as it is."""
    sizes, number = resolve(part.recipe.parallel, part.world_size), part.recipe.model.num_moe_layers
    if not number or sizes.experts_are_unsharded(part.recipe.precision):
        return None
    trained = trained_experts_per_rank(part.recipe)
    whole = experts_per_rank(part.recipe) - stored_numbers(part, of_experts=True) if sizes.edp > 1 else trained
    return Group(whole / number, sizes.edp, trained / number)


def reduced_bytes(part: RankPart) -> float:
    """The bytes of a rank's shards of gradients, which FSDP reduces. Those of unsharded experts are added up by the
    computing stream."""
    sizes = resolve(part.recipe.parallel, part.world_size)
    shards = part.count.trained_dense_of_a_rank / sizes.fsdp
    if not sizes.experts_are_unsharded(part.recipe.precision):
        shards += trained_experts_per_rank(part.recipe) / sizes.edp
    return shards * BYTES_OF_DTYPE[part.recipe.precision.gradients_dtype]


def reducing_bytes(part: RankPart) -> float:
    """The bytes of a pool on the stream that reduces: the shards of gradients, and those of the largest group beside
    the sum of the microbatches before."""
    return _reducing_bytes(part, _pairs_of(part))


def _reducing_bytes(part: RankPart, pairs: Pairs) -> float:
    recipe = part.recipe
    is_once = recipe.parallel.accumulate_unsharded or num_microbatches(recipe, part.world_size) == 1
    largest = max(group.trained / group.num_ranks for pair in pairs for group in pair)
    return reduced_bytes(part) + (0.0 if is_once else largest * BYTES_OF_DTYPE[recipe.precision.reduce])


def other_streams_bytes(part: RankPart) -> float:
    """The bytes of a pool on the streams that gather, reduce and send."""
    pairs = _pairs_of(part)
    return _gathering_bytes(part, pairs) + _reducing_bytes(part, pairs) + message_bytes(part)


def message_bytes(part: RankPart) -> float:
    """The bytes of buffers of messages to and from other ranks, beside the activations in flight."""
    elements = microbatch_tokens(part.recipe) * part.recipe.model.hidden_size
    return part.num_messages * elements * BYTES_OF_DTYPE[part.recipe.precision.compute]


def _pairs_of(part: RankPart) -> Pairs:
    """Groups of a rank's parameters that FSDP gathers one after the other: embedding and head, in a pipeline the larger
    one, then the first block; a block, then its experts, if they are sharded; and where dense blocks meet others."""
    model, count = part.recipe.model, part.count
    sizes = resolve(part.recipe.parallel, part.world_size)

    def block(layer: int) -> Group:
        rows = [module for module in count.modules if module.is_in(layer) and module.region != "experts"]
        trained = sum(module.own_parameters * count.num_trained(module) / module.number for module in rows)
        return Group(sum(module.own_parameters for module in rows), sizes.fsdp, trained)

    ends = count["embedding"], count["head"]
    of_ends = [module for module in count.modules if module.region in ("embedding", "head")]
    trained_ends = [module.parameters * count.num_trained(module) / sizes.tp for module in of_ends]
    of_rank = sum if sizes.pp == 1 else max
    root = Group(of_rank(ends) / sizes.tp, sizes.fsdp, of_rank([0, *trained_ends]))
    moe = set(model.moe_layers)
    kinds = [layer in moe for layer in range(model.num_blocks)]
    blocks = {kind: [block(kinds.index(kind))] for kind in sorted(set(kinds))}
    if (experts := sharded_experts(part)) is not None:
        blocks[True].append(experts)
    pairs = [(root, blocks[kinds[0]][0]), *(pair for of_kind in blocks.values() for pair in pairwise(of_kind))]
    changes = sorted({(one, other) for one, other in pairwise(kinds) if one != other})
    return pairs + [(blocks[one][-1], blocks[other][0]) for one, other in changes]
