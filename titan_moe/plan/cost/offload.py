"""What `memory.offload` moves between a GPU and the host, and what it takes of both."""

import math

from titan_moe.config.modules import modules_of
from titan_moe.config.offload import offload_of
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe, microbatch_tokens, num_microbatches
from titan_moe.plan.pipeline.parts import LAYERS_UNDER_WAY, RankPart


def sent_bytes(recipe: Recipe) -> list[int]:
    """By layer, the bytes of a microbatch that the host keeps."""
    offload, layers = offload_of(recipe), range(recipe.model.num_blocks)
    if not offload.layers:
        return [0] * len(layers)
    modules = modules_of(recipe.model, recipe.parallel)
    size = microbatch_tokens(recipe) * BYTES_OF_DTYPE[recipe.precision.compute]
    stay = layers[-LAYERS_UNDER_WAY:] if recipe.parallel.pp == 1 else ()
    names = {layer: [] if layer in stay else offload.names_of(layer) for layer in layers}
    return [round(size * sum(it.sent_with(names[layer]) for it in modules if it.is_in(layer))) for layer in layers]


def host_bytes(part: RankPart) -> int:
    """The bytes of the host that a rank takes, for all microbatches in flight."""
    return math.ceil(part.num_in_flight * sum(sent_bytes(part.recipe)))


def copied_bytes(part: RankPart) -> int:
    """The bytes that a rank copies in a step, in each direction."""
    number = num_microbatches(part.run or part.recipe, part.world_size)
    return number * sum(sent_bytes(part.recipe))
