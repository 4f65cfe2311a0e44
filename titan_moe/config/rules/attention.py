"""Rules of the attention layer's shape, on any device."""

from collections.abc import Iterator

from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, is_no_divisor, rule, rules_in


@rule("each key/value head is shared by the same number of query heads", "model.attention.num_kv_heads num_heads")
def kv_heads_divide_heads(recipe: Recipe, world_size: int) -> Iterator[str]:
    a = recipe.model.attention
    if a.kind == "gqa" and is_no_divisor(a.num_kv_heads, a.num_heads):
        yield (
            f"model.attention.num_kv_heads = {a.num_kv_heads} does not divide model.attention.num_heads = {a.num_heads}"
        )


@rule("RoPE rotates pairs", "model.attention.head_dim qk_rope_head_dim")
def rotated_width_is_even(recipe: Recipe, world_size: int) -> Iterator[str]:
    key = "head_dim" if recipe.model.attention.kind == "gqa" else "qk_rope_head_dim"
    width = getattr(recipe.model.attention, key)
    if width % 2:
        yield Problem(f"model.attention.{key} = {width} is odd", steps=[2])


@rule("mla normalises its compressed latents and has no biases", "model.attention.kind qk_norm qkv_bias")
def gqa_options_need_gqa(recipe: Recipe, world_size: int) -> Iterator[str]:
    for key in ("qk_norm", "qkv_bias"):
        if recipe.model.attention.kind == "mla" and getattr(recipe.model.attention, key):
            yield f'model.attention.{key} = true needs model.attention.kind = "gqa", not "mla"'


@rule("YaRN blends the frequencies between beta_fast and beta_slow", "model.attention.yarn_beta_fast yarn_beta_slow")
def yarn_betas_are_ordered(recipe: Recipe, world_size: int) -> Iterator[str]:
    a = recipe.model.attention
    if a.yarn_factor > 1 and a.yarn_beta_fast <= a.yarn_beta_slow:
        yield (
            f"model.attention.yarn_beta_fast = {a.yarn_beta_fast:g} is not above "
            f"model.attention.yarn_beta_slow = {a.yarn_beta_slow:g}"
        )


ATTENTION_RULES = rules_in(globals())
