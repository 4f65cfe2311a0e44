"""Rules of context parallelism: sizes that it must divide, and settings that it does not support."""

from collections.abc import Iterator

from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, in_words, is_no_divisor, row, rule, rules_in, splits_of

HEAD_DIM_MULTIPLE, LARGEST_HEAD_DIM = 8, 256
"""Of the kernels of ring attention for GPUs."""


cp_kind_needs_cp = row(
    "an option without effect hides a mistake",
    lambda r: r.parallel.cp == 1 and r.parallel.cp_kind != ParallelConfig.cp_kind,
    "{parallel.cp_kind} needs context parallelism, but {parallel.cp}",
)


@rule(
    "each rank has an equal part of every sequence: with ulysses one chunk, else one chunk from each end",
    "parallel.cp tp cp_kind train.seq_len_tokens",
)
def cp_divides_sequences(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, num_tokens = recipe.parallel, recipe.train.seq_len_tokens
    if p.cp > 1 and is_no_divisor(p.length_multiple, num_tokens):
        chunks = "2 * " if p.cp_kind != "ulysses" else ""
        yield Problem(
            f"{chunks}parallel.cp * tp = {chunks}{p.cp} * {p.tp} = {p.length_multiple} does not divide "
            f"train.seq_len_tokens = {num_tokens}",
            steps=[p.length_multiple],
        )


@rule(
    "with ulysses each rank computes whole heads, which share a key/value head with the same number of others",
    "parallel.cp cp_kind tp model.attention.num_heads num_kv_heads",
)
def cp_divides_heads(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, tp = recipe.parallel, max(recipe.parallel.tp, 1)
    for split in splits_of(recipe, p.cp) if p.cp_kind == "ulysses" else ():
        if split.is_of_heads and not split.fits(p.cp, tp):
            of_tp = f" on {p.tp} tp ranks" if p.tp > 1 else ""
            yield f"parallel.cp = {p.cp} does not divide {in_words(split)}{of_tp}"


cp_supports_the_recipe = row(
    "context parallelism does not support this setting",
    lambda r: r.parallel.cp > 1 and r.model.class_ != ModelConfig.class_,
    "{parallel.cp} does not support {model.class}",
)


@rule(
    "ring attention reads one block of keys after the other, plain causal, and merges results by the log-sum-exp",
    "parallel.cp_kind data.document_attention model.attention.sliding_window attention_chunk_size head_dim "
    "perf.attention precision.compute run.device",
)
def ring_supports_the_recipe(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.parallel.cp > 1 and recipe.parallel.cp_kind == "ring":
        for found in _unsupported_by_ring(recipe):
            problem = f'parallel.cp_kind = "ring" does not support {found}'
            yield Problem(problem, steps=[HEAD_DIM_MULTIPLE, LARGEST_HEAD_DIM])


def _unsupported_by_ring(recipe: Recipe) -> Iterator[str]:
    """Yield each setting of a recipe that ring attention does not support."""
    m, a, backend = recipe.model, recipe.model.attention, recipe.perf.attention
    compute, num_tokens = recipe.precision.compute, recipe.train.seq_len_tokens
    if a.kind == "mla":
        yield 'model.attention.kind = "mla", whose latents are narrower than its keys and values'
    if recipe.data.document_attention:
        yield "data.document_attention = true"
    if any(a.window(layer, num_tokens) < num_tokens for layer in range(m.num_layers)):
        yield f"model.attention.sliding_window = {a.sliding_window}"
    if any(a.chunk(layer, num_tokens) < num_tokens for layer in range(m.num_layers)):
        yield f"model.attention.attention_chunk_size = {a.attention_chunk_size}"
    if backend in ("efficient", "math"):
        yield f'perf.attention = "{backend}", which returns no log-sum-exp of each query'
    if recipe.run.device != "cpu" and compute != "bf16":
        yield f'precision.compute = "{compute}" on GPUs, where the kernels of ring attention take bf16'
    if recipe.run.device != "cpu" and a.kind == "gqa" and a.head_dim % HEAD_DIM_MULTIPLE:
        yield f"model.attention.head_dim = {a.head_dim}, which is not a multiple of {HEAD_DIM_MULTIPLE}"
    if recipe.run.device != "cpu" and a.kind == "gqa" and a.head_dim > LARGEST_HEAD_DIM:
        yield f"model.attention.head_dim = {a.head_dim}, more than the kernels of ring attention take"


CONTEXT_RULES = rules_in(globals())
