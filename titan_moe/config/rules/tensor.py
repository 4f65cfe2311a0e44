"""Rules of tensor parallelism: sizes that it must divide, and settings that it does not support yet."""

from collections.abc import Iterator

from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import ranks_of_a_node, smallest_world
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import divisors, is_no_divisor, nearest_multiples, rule, rules_in

NO_TP = "parallel.tp = 1"


@rule("each tp rank computes whole heads, which share a key/value head with the same number of others")
def tp_divides_heads(recipe: Recipe, world_size: int) -> Iterator[str]:
    a, tp = recipe.model.attention, recipe.parallel.tp
    if not _heads_fit(recipe, tp):
        shared = f" over {a.num_kv_heads} key/value heads" if a.kind == "gqa" else ""
        sizes = ", ".join(str(size) for size in range(1, a.num_heads + 1) if _heads_fit(recipe, size))
        yield f"parallel.tp = {tp} does not divide model.attention.num_heads = {a.num_heads}{shared}; take {sizes}"


def _heads_fit(recipe: Recipe, tp: int) -> bool:
    """Whether heads divide by the ranks, and key/value heads by ranks or ranks by them."""
    a = recipe.model.attention
    if tp < 1 or is_no_divisor(tp, a.num_heads):
        return tp < 1
    kv_heads = a.num_kv_heads if a.kind == "gqa" else tp
    return kv_heads < 1 or kv_heads % tp == 0 or tp % kv_heads == 0


@rule("each tp rank has an equal part of this width")
def tp_divides_widths(recipe: Recipe, world_size: int) -> Iterator[str]:
    m, tp = recipe.model, recipe.parallel.tp
    widths = {"vocab_size": m.vocab_size}
    if m.num_layers > m.num_moe_layers:
        widths["ffn_hidden_size"] = m.ffn_hidden_size
    if m.num_moe_layers > 0:
        widths["moe.shared_ffn_hidden_size"] = m.moe.shared_ffn_hidden_size
    for key, width in widths.items():
        if width > 0 and is_no_divisor(tp, width):
            # a smaller vocabulary has no row for the last ids
            sizes = -(-width // tp) * tp if key == "vocab_size" else nearest_multiples(width, tp)
            yield f"parallel.tp = {tp} does not divide model.{key} = {width}; take {sizes}, or a tp that divides it"


@rule("between layers each tp rank has an equal part of every sequence")
def tp_divides_sequences(recipe: Recipe, world_size: int) -> Iterator[str]:
    tp, num_tokens = recipe.parallel.tp, recipe.train.seq_len_tokens
    if is_no_divisor(tp, num_tokens):
        yield (
            f"parallel.tp = {tp} does not divide train.seq_len_tokens = {num_tokens}; "
            f"take {nearest_multiples(num_tokens, tp)}"
        )


@rule("FSDP shards the columns of weights whose rows tp splits, in equal parts, over dp_shard * cp ranks")
def dp_shard_divides_columns(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, m = recipe.parallel, recipe.model
    others = max(p.pp * p.dp_replicate * p.cp * p.tp, 1)
    dp_shard = max(world_size // others, 1) if p.dp_shard == -1 else p.dp_shard
    axes, num_shards = ("dp_shard", dp_shard) if p.cp == 1 else ("dp_shard * cp", dp_shard * p.cp)
    widths = {"hidden_size": m.hidden_size}
    if m.attention.kind == "mla":
        widths |= {"attention.q_lora_rank": m.attention.q_lora_rank, "attention.kv_lora_rank": m.attention.kv_lora_rank}
    for key, width in widths.items():
        if p.tp > 1 and is_no_divisor(num_shards, width):
            yield (
                f"{axes} = {num_shards} does not divide model.{key} = {width}, which parallel.tp = {p.tp} requires; "
                f"raise parallel.dp_replicate or tp, or take {NO_TP}"
            )


@rule("tensor parallelism does not support this setting yet")
def tp_supports_the_recipe(recipe: Recipe, world_size: int) -> Iterator[str]:
    m, p = recipe.model, recipe.parallel
    if p.tp > 1 and m.class_ != ModelConfig.class_:
        ways_out = f'"{ModelConfig.class_}", or {NO_TP}'
        yield f'parallel.tp = {p.tp} does not support model.class = "{m.class_}"; take {ways_out}'


@rule("overlapped GEMMs read the memory of the other GPUs of a node, part by part, in the dtype of precision.compute")
def tp_overlap_is_possible(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, num_local = recipe.parallel, ranks_of_a_node(world_size)
    if not p.tp_comm_overlap:
        return
    if p.tp == 1:
        yield "parallel.tp_comm_overlap = true has no messages to hide with parallel.tp = 1; take false, or tp = 2"
    if recipe.run.device == "cpu":
        yield 'parallel.tp_comm_overlap = true needs run.device = "cuda", not "cpu"; take false'
    if p.tp > 1 and world_size >= smallest_world(p) and is_no_divisor(p.tp, num_local):
        yield (
            f"parallel.tp = {p.tp} does not divide the {num_local} ranks of a node, which parallel.tp_comm_overlap = "
            f"true needs; take a divisor of it ({divisors(num_local)}), or tp_comm_overlap = false"
        )
    if recipe.precision.format_of("linears") != "compute":
        yield (
            f"parallel.tp_comm_overlap = true does not support precision.linears = "
            f'"{recipe.precision.format_of("linears")}"; take precision.linears = "compute", or tp_comm_overlap = false'
        )


TENSOR_RULES = rules_in(globals())
