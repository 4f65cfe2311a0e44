"""The cost of summing gradients over tp: those of parameters that every tensor-parallel rank has, once a step.

A rank copies its shards of these gradients into a flat message, all-reduces it and copies the sums back
(parallel/grads.py). In a ring all-reduce over P ranks a rank receives 2 (P - 1) / P of a message.
"""

from titan_moe.config.parallel import resolve
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.plan.pipeline.parts import RankPart

MESSAGE_ELEMENTS = 64 * 2**20
"""The largest message of a sum over tp, in elements: 256 MiB in fp32. A larger gradient is a separate message."""


def replicated_elements(part: RankPart) -> float:
    """Count the gradients that a rank sums over tp: its shards of the parameters that all ranks of tp have."""
    sizes = resolve(part.recipe.parallel, part.world_size)
    return part.count.replicated_over_tp / sizes.fsdp if sizes.tp > 1 else 0.0


def flat_copy_bytes(part: RankPart) -> int:
    """Count the bytes of the largest message. One message exists at a time, after all activations are freed."""
    sizes = resolve(part.recipe.parallel, part.world_size)
    largest_gradient = max(module.whole for module in part.count.modules) / sizes.fsdp
    elements = min(replicated_elements(part), max(MESSAGE_ELEMENTS, largest_gradient))
    return round(elements * BYTES_OF_DTYPE[part.recipe.precision.reduce])


def received_bytes(part: RankPart) -> float:
    """Count the bytes of all messages that a rank receives in a step."""
    share = 2 * (1 - 1 / part.recipe.parallel.tp)
    return share * replicated_elements(part) * BYTES_OF_DTYPE[part.recipe.precision.reduce]


def copied_bytes(part: RankPart) -> float:
    """Count the bytes that the copies into messages and back read and write in a step."""
    precision = part.recipe.precision
    return (
        2 * replicated_elements(part) * (BYTES_OF_DTYPE[precision.gradients_dtype] + BYTES_OF_DTYPE[precision.reduce])
    )
