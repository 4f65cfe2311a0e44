"""What Muon costs: its matrices, the FLOPs of Newton-Schulz, the bytes of momenta and messages. optim/muon.py takes the
same parameters, by their kinds."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from titan_moe.config.adapter import num_matrices
from titan_moe.config.model import ModelConfig
from titan_moe.config.modules import Module
from titan_moe.config.optimizers import MUON_BUCKET_ELEMENTS, OPTIMIZERS
from titan_moe.config.parallel import ranks_of_a_node, resolve
from titan_moe.plan.cost.count import training_flops_per_token
from titan_moe.plan.pipeline.parts import RankPart

TEMPORARY_BYTES = 16
"""Of an element of what is updated together: an fp32 sum or update, and bf16 stacks, messages and products."""

BYTES_OF_A_PEER = 0.4 * 2**30
"""What NCCL allocates for messages from one rank to another and back: 1.2 GiB were seen on each of 4 H100s."""
ROWS_OF_A_TILE = 128
"""Of a symmetric product (kernels/optim/symmetric.py)."""

Shape = tuple[int, int]


class Stack(NamedTuple):
    """Matrices of a rank, each held whole or shared with other ranks."""

    shapes: tuple[Shape, ...]  # rows and columns of a matrix; of all of a fused weight
    number: float  # of these that a rank has, whole or a shard of
    ranks: tuple[int, ...]  # along each axis that shares them
    own: Shape  # the rank's part of one, for weights that differ in it

    @property
    def num_ranks(self) -> int:
        """The ranks that share one."""
        return math.prod(self.ranks)

    @property
    def num_owned(self) -> float:
        """How many the busiest rank computes."""
        return self.number if self.num_ranks == 1 else math.ceil(self.number / self.num_ranks)

    @property
    def elements(self) -> int:
        """Those of one whole."""
        return sum(rows * columns for rows, columns in self.shapes)

    @property
    def own_elements(self) -> float:
        """Those of the rank's shards of all."""
        return self.number * self.elements / self.num_ranks


def newton_schulz_flops(rows: int, columns: int, num_steps: int, *, by_halves: bool) -> int:
    """Count the FLOPs of one matrix: X X^T, its square, and the product of a polynomial of it with X, in each step. The
    first two are symmetric: by halves, as kernels/optim/symmetric.py computes them on a GPU, they are tiles on and
    below the diagonal alone."""
    short, long = sorted((rows, columns))
    elements = short * min(short, (short + ROWS_OF_A_TILE) // 2) if by_halves else short * short
    return num_steps * (2 * elements * (long + short) + 2 * short * short * long)


def is_muons(row: Module) -> bool:
    """Whether Muon updates the matrices of a module."""
    has_matrix = row.part is not None and min(row.widths) > 1
    return has_matrix and not row.is_adapter and row.region not in ("embedding", "head", "router")


def shapes_of(row: Module, model: ModelConfig) -> tuple[Shape, ...]:
    """The matrices of a module that is not a routed expert, each of a fused weight."""
    inputs, outputs = row.widths
    number, a = num_matrices(row.path), model.attention
    if number == 3 and (a.num_heads + 2 * a.num_kv_heads) * a.head_dim == outputs:
        return tuple((heads * a.head_dim, inputs) for heads in (a.num_heads, a.num_kv_heads, a.num_kv_heads))
    return ((outputs // number, inputs),) * number if number == 2 else ((outputs, inputs),)


def stacks_of(part: RankPart) -> Iterator[Stack]:
    """What Muon updates on a rank of a pipeline rank."""
    model, p = part.recipe.model, part.recipe.parallel
    sizes = resolve(p, part.world_size)
    for row in part.count.modules:
        if not is_muons(row):
            continue
        number = part.count.num_trained(row)
        if row.region != "experts":
            over_tp = 1 if row.whole else max(p.tp, 1)
            yield Stack(shapes_of(row, model), number, (sizes.fsdp, over_tp), row.own_widths)
            continue
        (width, hidden), experts = row.widths, model.moe.num_experts / max(p.ep, 1)
        ranks = sizes.edp, max(p.etp, 1)
        yield Stack(((hidden, width),), number * 2 * experts, ranks, row.own_widths)
        yield Stack(((width, hidden),), number * experts, ranks, row.own_widths)


def update_flops(part: RankPart, *, by_halves: bool = True) -> float:
    """Count the FLOPs of Newton-Schulz in one step on the busiest rank; 0 with another optimizer. By halves on a GPU;
    whole products on a CPU.

    Ranks share the matrices of one shape, none of them a part of one. Replicas compute the same.
    """
    muon = part.recipe.optim.muon
    alike: dict[Stack, float] = {}
    for stack in _stacks(part):
        key = stack._replace(number=0.0)
        alike[key] = alike.get(key, 0.0) + stack.number
    stacks = [stack._replace(number=number) for stack, number in alike.items()]
    return sum(
        stack.num_owned * sum(newton_schulz_flops(*it, muon.ns_steps, by_halves=by_halves) for it in stack.shapes)
        for stack in stacks
    )


def muon_parameters(part: RankPart) -> float:
    """Count the parameters of a rank's shards that have one momentum instead of two moments; 0 with another
    optimizer."""
    return sum(stack.own_elements for stack in _stacks(part))


def exchanged_bytes(part: RankPart) -> float:
    """Count the bytes that a rank receives in a step: shards of what it owns, and updates of its shards, in bf16."""
    return sum(4 * stack.own_elements * sum(1 - 1 / ranks for ranks in stack.ranks) for stack in _stacks(part))


def temporary_bytes(part: RankPart) -> float:
    """Bytes that exist while the largest stack is updated; 0 with another optimizer."""
    together = (min(max(MUON_BUCKET_ELEMENTS, stack.elements), stack.own_elements) for stack in _stacks(part))
    return TEMPORARY_BYTES * max(together, default=0.0)


def connection_bytes(part: RankPart) -> float:
    """Bytes that NCCL allocates beside PyTorch for the messages between ranks that share matrices, which no other part
    of a step sends each to each; on the links of a node."""
    axes = {number for stack in _stacks(part) for number in stack.ranks if number > 1}
    of_node = ranks_of_a_node(part.world_size)
    return BYTES_OF_A_PEER * sum(min(number, of_node) - 1 for number in axes)


def describe_muon(parts: Sequence[RankPart]) -> Iterator[str]:
    """What an optimizer step costs beside AdamW's, on the pipeline rank with the most products; nothing with AdamW."""
    part = max(parts, key=update_flops)
    recipe = part.run or part.recipe
    if not (flops := update_flops(part, by_halves=recipe.run.device != "cpu")):
        return
    tokens = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens
    a_token = training_flops_per_token(recipe.model, recipe.train.seq_len_tokens, recipe.optim.trainable)
    share = flops / (a_token * tokens / part.world_size)
    yield f"{flops / 1e12:.3g} TFLOP of Newton-Schulz a rank and step, {share:.1%} beside the model's, not in MFU"
    saved = muon_parameters(part) * recipe.precision.bytes_of_moments / 2
    received = f", {size / 2**30:.3g} GiB of messages a step" if (size := exchanged_bytes(part)) else ""
    yield f"one momentum in place of two moments: {saved / 2**30:.3g} GiB less a rank than AdamW{received}"


def _stacks(part: RankPart) -> Iterator[Stack]:
    if OPTIMIZERS[part.recipe.optim.kind].orthogonalises:
        yield from stacks_of(part)
