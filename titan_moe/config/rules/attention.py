"""Rules of the attention layer's shape, on any device."""

from collections.abc import Iterator

from titan_moe.config.attention import AttentionConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, divides, row, rule, rules_in, said
from titan_moe.config.schema import in_toml

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


@rule("RoPE rotates pairs", "model.attention.partial_rotary_factor head_dim")
def rotated_share_is_even(recipe: Recipe, world_size: int) -> Iterator[str]:
    a = recipe.model.attention
    if a.kind == "gqa" and 0 < a.partial_rotary_factor < 1 and (a.rotated_head_dim % 2 or not a.rotated_head_dim):
        share = f"model.attention.partial_rotary_factor = {a.partial_rotary_factor}"
        yield f"{share} rotates {a.rotated_head_dim} of head_dim = {a.head_dim} elements, not an even number from 2 on"


norm_over_all_heads_is_a_norm = row(
    "a model without the norm has none over all heads",
    lambda r: r.model.attention.qk_norm_over != "head" and not r.model.attention.qk_norm,
    "{model.attention.qk_norm_over} needs model.attention.qk_norm = true, but {model.attention.qk_norm}",
)


@rule("all heads together have no position to rotate", "model.attention.qk_norm qk_norm_over qk_norm_is_after_rope")
def norm_after_rope_is_over_heads(recipe: Recipe, world_size: int) -> Iterator[str]:
    a = recipe.model.attention
    if a.qk_norm_is_after_rope and not (a.qk_norm and a.qk_norm_over == "head"):
        needs = 'model.attention.qk_norm = true and qk_norm_over = "head"'
        yield f"model.attention.qk_norm_is_after_rope = true needs {needs}"


norm_without_weights_is_after_rope = row(
    "before RoPE, which keeps the size of a head, the same norm is that after it",
    lambda r: not r.model.attention.qk_norm_has_weights and not r.model.attention.qk_norm_is_after_rope,
    "{model.attention.qk_norm_has_weights} needs model.attention.qk_norm = true and qk_norm_is_after_rope = true",
    "model.attention.qk_norm_has_weights qk_norm_is_after_rope qk_norm qk_norm_over",
)


@rule(
    "weights of layers without the norm would never change",
    "model.attention.qk_norm_layers qk_norm_has_weights nope_every rope_layers",
)
def norm_of_rope_layers_has_no_weights(recipe: Recipe, world_size: int) -> Iterator[str]:
    a = recipe.model.attention
    if a.qk_norm_layers == "rope" and (a.qk_norm_has_weights or (not a.nope_every and a.rope_layers == "all")):
        yield (
            'model.attention.qk_norm_layers = "rope" needs model.attention.qk_norm_has_weights = false, and nope_every '
            f'from 1 on or rope_layers = "windowed", but they are {in_toml(a.qk_norm_has_weights)}, {a.nope_every} and '
            f"{in_toml(a.rope_layers)}"
        )


EXTENSIONS = ("rope_theta", "yarn_factor", "llama3_factor", "longrope_short_factor")
"""What the rotary embedding of layers with windows lacks, where it has a base of its own."""


@rule(
    "an option of layers that there are none of has no effect",
    "model.attention.attn_scale nope_every rope_layers window_rope_theta sliding_window full_attention_every "
    f"window_layers {' '.join(EXTENSIONS)}",
)
def options_of_rope_have_layers(recipe: Recipe, world_size: int) -> Iterator[str]:
    a = recipe.model.attention
    kinds = {(a.has_rope(layer), a.has_window(layer)) for layer in range(recipe.model.num_layers)}
    has_rope = {rope for rope, _ in kinds}
    if a.attn_scale != 0 and False not in has_rope:
        yield said(recipe, "{model.attention.attn_scale} has no effect: every layer has a rotary embedding")
    if a.sliding_window == 0:  # other rules say that windows are needed
        return
    if a.rope_layers == "windowed" and True not in has_rope:
        yield said(recipe, "{model.attention.rope_layers} leaves no layer one with {model.attention.nope_every}")
    elif a.window_rope_theta and (True, True) not in kinds:
        words = "{model.attention.window_rope_theta} has no effect: no layer with a window has a rotary embedding"
        yield said(recipe, words)
    elif a.window_rope_theta and (True, False) not in kinds:
        for key in (key for key in EXTENSIONS if getattr(a, key) != getattr(AttentionConfig, key)):
            words = (
                f"has no effect: with window_rope_theta = {a.window_rope_theta:g} it is that of layers without window"
            )
            yield f"model.attention.{key} = {in_toml(getattr(a, key))} {words}, and none of them has a rotary embedding"


chunks_have_no_windows = row(
    "a layer has chunks or a window",
    lambda r: r.model.attention.attention_chunk_size > 0 and r.model.attention.sliding_window > 0,
    "{model.attention.attention_chunk_size} does not go with {model.attention.sliding_window}; set one of them to 0",
)
some_layers_have_chunks = row(
    "the layers with rotary embedding have chunks",
    lambda r: r.model.attention.attention_chunk_size > 0 and r.model.attention.nope_every == 1,
    "{model.attention.attention_chunk_size} has no effect with {model.attention.nope_every}",
)


OF_GQA = ("qk_norm", "clip_qkv", "qkv_bias", "out_bias", "output_gate", "sinks", "partial_rotary_factor")


@rule(
    "mla normalises its compressed latents, and has no biases, gates and sinks",
    f"model.attention.kind {' '.join(OF_GQA)}",
)
def gqa_options_need_gqa(recipe: Recipe, world_size: int) -> Iterator[str]:
    for key in OF_GQA:
        value = getattr(recipe.model.attention, key)
        if recipe.model.attention.kind == "mla" and value != getattr(AttentionConfig, key):
            yield f'model.attention.{key} = {in_toml(value)} needs model.attention.kind = "gqa", not "mla"'


yarn_betas_are_ordered = row(
    "YaRN blends the frequencies between beta_fast and beta_slow",
    lambda r: (
        r.model.attention.yarn_factor > 1 and r.model.attention.yarn_beta_fast <= r.model.attention.yarn_beta_slow
    ),
    "{model.attention.yarn_beta_fast} is not above {model.attention.yarn_beta_slow}",
)


@rule(
    "LongRoPE divides the frequency of each rotated pair, by one number in short contexts and by another in long ones",
    "model.attention.longrope_short_factor longrope_long_factor head_dim qk_rope_head_dim partial_rotary_factor",
)
def longrope_has_a_divisor_for_each_pair(recipe: Recipe, world_size: int) -> Iterator[str]:
    a = recipe.model.attention
    num_pairs = (a.rotated_head_dim if a.kind == "gqa" else a.qk_rope_head_dim) // 2
    if not (a.longrope_short_factor or a.longrope_long_factor):
        return
    for key in ("longrope_short_factor", "longrope_long_factor"):
        factors = getattr(a, key)
        if len(factors) != num_pairs:
            yield f"model.attention.{key} has {len(factors)} numbers for the {num_pairs} rotated pairs of a head"
        elif not all(0 < factor < float("inf") for factor in factors):
            yield f"model.attention.{key} has numbers that are not finite and above 0"


rope_of_windows_needs_windows = row(
    "layers with a sliding window have it",
    lambda r: r.model.attention.rope_layers == "windowed" and r.model.attention.sliding_window == 0,
    "{model.attention.rope_layers} leaves no layer a rotary embedding with {model.attention.sliding_window}",
)
theta_of_windows_needs_windows = row(
    "it is the base of layers with a sliding window",
    lambda r: r.model.attention.window_rope_theta != 0 and r.model.attention.sliding_window == 0,
    "{model.attention.window_rope_theta} has no effect with {model.attention.sliding_window}",
)
theta_of_windows_is_a_base = row(
    "frequencies are negative powers of it",
    lambda r: 0 < r.model.attention.window_rope_theta <= 1,
    "{model.attention.window_rope_theta} must be above 1, or 0 for that of other layers",
)
llama3_factors_are_ordered = row(
    "frequencies between the two are blended",
    lambda r: (
        r.model.attention.llama3_factor > 1
        and r.model.attention.llama3_high_freq_factor <= r.model.attention.llama3_low_freq_factor
    ),
    "{model.attention.llama3_high_freq_factor} is not above {model.attention.llama3_low_freq_factor}",
)
llama3_excludes_others = row(
    "each extends the context by its own frequencies",
    lambda r: (
        r.model.attention.llama3_factor > 1
        and (r.model.attention.yarn_factor > 1 or r.model.attention.longrope_short_factor)
    ),
    "{model.attention.llama3_factor} goes neither with YaRN nor with LongRoPE",
    "model.attention.llama3_factor yarn_factor longrope_short_factor",
)
longrope_excludes_yarn = row(
    "both extend the context, each by its own frequencies",
    lambda r: r.model.attention.longrope_short_factor and r.model.attention.yarn_factor > 1,
    "{model.attention.yarn_factor} does not go with model.attention.longrope_short_factor",
    "model.attention.longrope_short_factor yarn_factor",
)


ATTENTION_RULES = rules_in(globals())
