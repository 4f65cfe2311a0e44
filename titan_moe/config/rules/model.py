"""Rules of the model's shape, on any device."""

from collections.abc import Iterator

from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import divisors, is_no_divisor, rule, rules_in
from titan_moe.config.schema import counted


@rule("the class is imported by this name")
def class_is_addressable(recipe: Recipe, world_size: int) -> Iterator[str]:
    module, _, name = recipe.model.class_.partition(":")
    if not (all(part.isidentifier() for part in module.split(".")) and name.isidentifier()):
        yield f'model.class = "{recipe.model.class_}" must read "package.module:Class"'


@rule("tied embeddings are the weight of the head, whose deviation is init_std")
def tied_embeddings_have_one_deviation(recipe: Recipe, world_size: int) -> Iterator[str]:
    m = recipe.model
    if m.embeddings_are_tied and m.embedding_init_std not in (ModelConfig.embedding_init_std, m.init_std):
        yield (
            f"model.embedding_init_std = {m.embedding_init_std:g} has no effect with model.embeddings_are_tied = true; "
            "drop it, scale embeddings by model.embedding_multiplier, or set embeddings_are_tied = false"
        )


@rule("tied embeddings are the weight of the head, which decays")
def tied_embeddings_decay(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.model.embeddings_are_tied and not recipe.optim.embeddings_decay:
        yield (
            "optim.embeddings_decay = false has no effect with model.embeddings_are_tied = true; set it to true, "
            "or embeddings_are_tied = false"
        )


@rule("each key/value head is shared by the same number of query heads")
def kv_heads_divide_heads(recipe: Recipe, world_size: int) -> Iterator[str]:
    a = recipe.model.attention
    if a.kind == "gqa" and is_no_divisor(a.num_kv_heads, a.num_heads):
        yield (
            f"model.attention.num_kv_heads = {a.num_kv_heads} does not divide "
            f"model.attention.num_heads = {a.num_heads}; the divisors are {divisors(a.num_heads)}"
        )


@rule("RoPE rotates pairs")
def rotated_width_is_even(recipe: Recipe, world_size: int) -> Iterator[str]:
    key = "head_dim" if recipe.model.attention.kind == "gqa" else "qk_rope_head_dim"
    width = getattr(recipe.model.attention, key)
    if width % 2:
        yield f"model.attention.{key} = {width} is odd; take {width + 1}"


@rule("mla normalises its compressed latents and has no biases")
def gqa_options_need_gqa(recipe: Recipe, world_size: int) -> Iterator[str]:
    for key in ("qk_norm", "qkv_bias"):
        if recipe.model.attention.kind == "mla" and getattr(recipe.model.attention, key):
            yield f'model.attention.{key} = true needs model.attention.kind = "gqa", not "mla"; set it to false'


@rule("a pattern of windowed and full layers has both")
def full_layers_are_some_of_the_layers(recipe: Recipe, world_size: int) -> Iterator[str]:
    a, num_layers = recipe.model.attention, recipe.model.num_layers
    if a.full_attention_every > 0 and a.sliding_window == 0:
        yield (
            f"model.attention.full_attention_every = {a.full_attention_every} needs windows in the other layers, but "
            "model.attention.sliding_window = 0; set the window, or full_attention_every = 0"
        )
    elif a.full_attention_every == 1:
        yield (
            "model.attention.full_attention_every = 1 leaves no layer to model.attention.sliding_window = "
            f"{a.sliding_window}; take 2 or more, 0 for windows everywhere, or sliding_window = 0 for none"
        )
    elif a.full_attention_every > num_layers:
        yield (
            f"model.attention.full_attention_every = {a.full_attention_every} exceeds model.num_layers = {num_layers}, "
            "so every layer has a window; take a smaller number, or 0 if every layer should have one"
        )


@rule("YaRN blends the frequencies between beta_fast and beta_slow")
def yarn_betas_are_ordered(recipe: Recipe, world_size: int) -> Iterator[str]:
    a = recipe.model.attention
    if a.yarn_factor > 1 and a.yarn_beta_fast <= a.yarn_beta_slow:
        yield (
            f"model.attention.yarn_beta_fast = {a.yarn_beta_fast:g} is not above "
            f"model.attention.yarn_beta_slow = {a.yarn_beta_slow:g}; the paper uses 32 and 1"
        )


@rule("the dense layers are the first layers of the model")
def dense_layers_fit(recipe: Recipe, world_size: int) -> Iterator[str]:
    m = recipe.model
    if m.num_dense_layers > m.num_layers:
        yield f"model.num_dense_layers = {m.num_dense_layers} exceeds model.num_layers = {m.num_layers}; take fewer"


@rule("a feed-forward layer of width 0 computes nothing")
def dense_layers_have_a_width(recipe: Recipe, world_size: int) -> Iterator[str]:
    m = recipe.model
    num_dense_layers = m.num_layers - m.num_moe_layers
    if num_dense_layers > 0 and m.ffn_hidden_size == 0:
        cause = f"num_dense_layers = {m.num_dense_layers}" if m.moe.num_experts else "moe.num_experts = 0"
        yield (
            f"model.ffn_hidden_size = 0, but model.{cause} makes {counted(num_dense_layers, 'layer')} dense; "
            "set the width of dense layers, or give every layer experts"
        )


@rule("an expert of width 0 computes nothing")
def experts_have_a_width(recipe: Recipe, world_size: int) -> Iterator[str]:
    m = recipe.model
    if m.num_moe_layers > 0 and m.moe.ffn_hidden_size == 0:
        yield (
            f"model.moe.ffn_hidden_size = 0, but the model has {counted(m.num_moe_layers, 'layer')} of "
            f"{counted(m.moe.num_experts, 'expert')}; set the width of one expert"
        )


@rule("a token chooses an expert once")
def top_k_fits_experts(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    if 0 < moe.num_experts < moe.top_k:
        yield (
            f"model.moe.top_k = {moe.top_k} exceeds model.moe.num_experts = {moe.num_experts}; "
            f"take at most {moe.num_experts}"
        )


@rule("with one expert per token, the normalised routing weight is always 1")
def one_weight_is_not_normalised(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    if moe.num_experts > 0 and moe.top_k == 1 and moe.normalize_topk:
        yield (
            "model.moe.top_k = 1 with model.moe.normalize_topk = true gives the router no gradient through the scores; "
            "set normalize_topk = false, or take a top_k of at least 2"
        )


@rule("every group holds the same number of experts")
def groups_divide_experts(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    if moe.num_experts > 0 and is_no_divisor(moe.num_groups, moe.num_experts):
        yield (
            f"model.moe.num_groups = {moe.num_groups} does not divide model.moe.num_experts = {moe.num_experts}; "
            f"the divisors are {divisors(moe.num_experts)}"
        )


@rule("a token chooses a group once")
def top_k_groups_fit_groups(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    if moe.top_k_groups > moe.num_groups:
        yield (
            f"model.moe.top_k_groups = {moe.top_k_groups} exceeds model.moe.num_groups = {moe.num_groups}; "
            f"take at most {moe.num_groups}, or more groups"
        )


@rule("a token's experts are in its chosen groups")
def top_k_fits_chosen_groups(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    num_candidates = moe.top_k_groups * (moe.num_experts // max(moe.num_groups, 1))
    if moe.num_groups > 1 and 0 < num_candidates < moe.top_k <= moe.num_experts:
        yield (
            f"model.moe.top_k = {moe.top_k} exceeds the {counted(num_candidates, 'expert')} in the groups of a "
            f"token, model.moe.top_k_groups = {moe.top_k_groups}; lower top_k or raise top_k_groups"
        )


@rule("a group is ranked by its two best scores")
def top2_groups_hold_two(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    if moe.group_score == "top2_sum" and 1 < moe.num_groups <= moe.num_experts < 2 * moe.num_groups:
        yield (
            f'model.moe.group_score = "top2_sum" needs two experts a group, but {moe.num_experts} experts in '
            f'model.moe.num_groups = {moe.num_groups} groups leave one; take fewer groups or group_score = "max"'
        )


@rule("the bias is on the scale of sigmoid scores")
def bias_needs_sigmoid(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    if moe.bias_update_speed > 0 and moe.score_fn != "sigmoid":
        yield (
            f'model.moe.bias_update_speed = {moe.bias_update_speed:g} needs model.moe.score_fn = "sigmoid", '
            f'which here is "{moe.score_fn}"; change it, or set bias_update_speed = 0 and balance with aux_loss_coef'
        )


@rule("the gate applies to shared experts only")
def shared_gate_needs_shared_experts(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe = recipe.model.moe
    if moe.shared_expert_gate and moe.shared_ffn_hidden_size == 0:
        yield (
            "model.moe.shared_expert_gate = true needs shared experts, but model.moe.shared_ffn_hidden_size = 0; "
            "set their width, or shared_expert_gate = false"
        )


MODEL_RULES = rules_in(globals())
