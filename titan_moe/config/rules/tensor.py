"""Rules of tensor parallelism: sizes that it must divide, and settings that it does not support yet."""

from collections.abc import Iterator

from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import ranks_of_a_node, smallest_world
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import (
    Problem,
    data_parallel_ranks,
    divides,
    in_words,
    is_no_divisor,
    row,
    rule,
    rules_in,
    said,
    splits_of,
)


@rule(
    "each tp rank computes whole heads, which share a key/value head with the same number of others",
    "parallel.tp model.attention.num_heads num_kv_heads",
)
def tp_divides_heads(recipe: Recipe, world_size: int) -> Iterator[str]:
    tp = recipe.parallel.tp
    for split in splits_of(recipe, tp):
        if split.is_of_heads and not split.fits(tp):
            yield f"parallel.tp = {tp} does not divide {in_words(split)}"


@rule("each tp rank has an equal part of this width", "parallel.tp")
def tp_divides_widths(recipe: Recipe, world_size: int) -> Iterator[str]:
    tp = recipe.parallel.tp
    for split in splits_of(recipe, tp):
        if not (split.is_of_heads or split.fits(tp)):
            problem = f"parallel.tp = {tp} does not divide {in_words(split)}"
            yield Problem(problem, "parallel.tp", f"model.{split.key}", steps=[tp])


tp_divides_sequences = divides(
    "between layers each tp rank has an equal part of every sequence", "parallel.tp", "train.seq_len_tokens"
)


@rule(
    "FSDP shards the columns of weights whose rows tp splits, in equal parts, over dp_shard * cp ranks",
    "parallel.dp_replicate tp cp",
)
def dp_shard_divides_columns(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    left = data_parallel_ranks(recipe, world_size) // max(p.dp_replicate, 1)
    dp_shard = max(left, 1) if p.dp_shard == -1 else p.dp_shard
    axes, num_shards = ("dp_shard", dp_shard) if p.cp == 1 else ("dp_shard * cp", dp_shard * p.cp)
    for key, width, _ in splits_of(recipe, p.tp, "fsdp_split"):
        if is_no_divisor(num_shards, width):
            required = f"model.{key} = {width}, which parallel.tp = {p.tp} requires"
            fields = ("parallel.dp_replicate", "parallel.tp", "parallel.cp", f"model.{key}")
            yield Problem(f"{axes} = {num_shards} does not divide {required}", *fields, steps=[num_shards])


tp_supports_the_recipe = row(
    "tensor parallelism does not support this setting yet",
    lambda r: r.parallel.tp > 1 and r.model.class_ != ModelConfig.class_,
    "{parallel.tp} does not support {model.class}",
)


@rule(
    "overlapped GEMMs read the memory of the other GPUs of a node, part by part, in the dtype of precision.compute",
    "parallel.tp_comm_overlap tp run.device precision.linears format model.attention.output_gate",
)
def tp_overlap_is_possible(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, num_local, needs = recipe.parallel, ranks_of_a_node(world_size), "parallel.tp_comm_overlap = true"
    if not p.tp_comm_overlap:
        return
    if recipe.model.attention.output_gate_width:
        yield said(
            recipe, f"{needs} gathers tokens for queries and keys alone, not for {{model.attention.output_gate}}"
        )
    if p.tp == 1:
        yield f"{needs} has no messages to hide with parallel.tp = 1"
    if recipe.run.device == "cpu":
        yield f'{needs} needs run.device = "cuda", not "cpu"'
    if p.tp > 1 and world_size >= smallest_world(p) and is_no_divisor(p.tp, num_local):
        yield f"parallel.tp = {p.tp} does not divide the {num_local} ranks of a node, which {needs} needs"
    if (chosen := recipe.precision.format_of("linears")) != "compute":
        yield f'{needs} does not support precision.linears = "{chosen}"'


TENSOR_RULES = rules_in(globals())
