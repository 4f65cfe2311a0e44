"""Rules of the attention layer's shape, on any device."""

from collections.abc import Iterator

from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, divides, row, rule, rules_in

kv_heads_divide_heads = divides(
    "each key/value head is shared by the same number of query heads",
    "model.attention.num_kv_heads",
    "model.attention.num_heads",
    lambda r: r.model.attention.kind == "gqa",
)


@rule("RoPE rotates pairs", "model.attention.head_dim qk_rope_head_dim")
def rotated_width_is_even(recipe: Recipe, world_size: int) -> Iterator[str]:
    key = "head_dim" if recipe.model.attention.kind == "gqa" else "qk_rope_head_dim"
    width = getattr(recipe.model.attention, key)
    if width % 2:
        yield Problem(f"model.attention.{key} = {width} is odd", steps=[2])


@rule("mla normalises its compressed latents and has no biases", "model.attention.kind qk_norm qkv_bias out_bias")
def gqa_options_need_gqa(recipe: Recipe, world_size: int) -> Iterator[str]:
    for key in ("qk_norm", "qkv_bias", "out_bias"):
        if recipe.model.attention.kind == "mla" and getattr(recipe.model.attention, key):
            yield f'model.attention.{key} = true needs model.attention.kind = "gqa", not "mla"'


yarn_betas_are_ordered = row(
    "YaRN blends the frequencies between beta_fast and beta_slow",
    lambda r: (
        r.model.attention.yarn_factor > 1 and r.model.attention.yarn_beta_fast <= r.model.attention.yarn_beta_slow
    ),
    "{model.attention.yarn_beta_fast} is not above {model.attention.yarn_beta_slow}",
)


ATTENTION_RULES = rules_in(globals())
