"""Rules of the model's shape, on any device."""

import re
from collections.abc import Iterator

from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, at_most, row, rule, rules_in, said
from titan_moe.config.schema import counted

ADDRESS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""`package.module:Class`."""
KINDS = ("num_dense_layers", "moe_every", "dense_layers")
"""Fields that say which layers are dense."""


class_is_addressable = row(
    "the class is imported by this name",
    lambda r: not ADDRESS.fullmatch(r.model.class_),
    '{model.class} must read "package.module:Class"',
)
table_is_of_a_class = row(
    "the default class is described already",
    lambda r: r.model.table and r.model.class_ == ModelConfig.class_,
    "{model.table} describes a model.class of your own, and the class is the default",
    "model.table class",
)
tied_embeddings_have_one_deviation = row(
    "tied embeddings are the weight of the head, whose deviation is init_std",
    lambda r: (
        r.model.embeddings_are_tied
        and r.model.embedding_init_std not in (ModelConfig.embedding_init_std, r.model.init_std)
    ),
    "{model.embedding_init_std} has no effect with {model.embeddings_are_tied}",
)
tied_embeddings_decay = row(
    "tied embeddings are the weight of the head, which decays",
    lambda r: r.model.embeddings_are_tied and not r.optim.embeddings_decay,
    "{optim.embeddings_decay} has no effect with {model.embeddings_are_tied}",
)


@rule("a pattern of windowed and full layers has both", "model.attention.full_attention_every sliding_window")
def full_layers_are_some_of_the_layers(recipe: Recipe, world_size: int) -> Iterator[str]:
    a, num_layers, key = recipe.model.attention, recipe.model.num_layers, "{model.attention.full_attention_every}"
    if a.full_attention_every > 0 and a.sliding_window == 0:
        yield said(recipe, f"{key} needs windows in the other layers, but {{model.attention.sliding_window}}")
    elif a.full_attention_every == 1:
        yield said(recipe, f"{key} leaves no layer to {{model.attention.sliding_window}}")
    elif a.full_attention_every > num_layers:
        yield said(recipe, f"{key} exceeds {{model.num_layers}}, so every layer has a window")


@rule("windows are of layers, each named once", "model.attention.window_layers sliding_window full_attention_every")
def window_layers_are_layers(recipe: Recipe, world_size: int) -> Iterator[str]:
    a, key = recipe.model.attention, "{model.attention.window_layers}"
    if not a.window_layers:
        return
    if not _are_layers(a.window_layers, recipe.model.num_layers):
        yield said(recipe, f"{key} must be different layers of {{model.num_layers}}")
    elif a.sliding_window == 0:
        yield said(recipe, f"{key} needs a window, but {{model.attention.sliding_window}}")
    elif a.full_attention_every > 0:
        yield said(recipe, f"{key} does not go with {{model.attention.full_attention_every}}: one says all")


layers_without_rope_are_some_of_the_layers = at_most(
    "every n-th layer has no rotary embedding, so none of fewer than n",
    "model.attention.nope_every",
    "model.num_layers",
)
dense_layers_fit = at_most(
    "the dense layers are the first layers of the model", "model.num_dense_layers", "model.num_layers"
)
moe_layers_are_some_of_the_layers = at_most(
    "every n-th layer has experts, so none of fewer than n", "model.moe_every", "model.num_layers"
)
some_layers_have_experts = row(
    "a model with experts has layers for them",
    lambda r: _has_kinds(r.model) and r.model.moe.num_experts > 0 and r.model.num_moe_layers == 0,
    "{model.num_dense_layers}, {model.moe_every} and {model.dense_layers} leave none of {model.num_layers} to the "
    "experts of {model.moe.num_experts}",
)
norms_after_experts_need_experts = row(
    "the norm is on the results of MoE layers",
    lambda r: r.model.norm_placement == "after_moe" and r.model.num_moe_layers == 0,
    "{model.norm_placement} has no effect in a model without MoE layers, whose {model.moe.num_experts}",
    "model.norm_placement model.moe.num_experts",
)
dense_layers_are_layers = row(
    "layers are numbered from 0, and each is named once",
    lambda r: not _are_layers(r.model.dense_layers, r.model.num_layers),
    "{model.dense_layers} must be different layers of {model.num_layers}",
)


def _has_kinds(model: ModelConfig) -> bool:
    """Whether dense layers are others than leading ones."""
    return model.num_layers > 0 and (model.moe_every > 1 or bool(model.dense_layers))


def _are_layers(layers: tuple[int, ...], num_layers: int) -> bool:
    return len(set(layers)) == len(layers) and all(0 <= layer < num_layers for layer in layers)


@rule(
    "a feed-forward layer of width 0 computes nothing",
    "model.ffn_hidden_size num_dense_layers moe_every dense_layers model.moe.num_experts",
)
def dense_layers_have_a_width(recipe: Recipe, world_size: int) -> Iterator[str]:
    m = recipe.model
    num_dense_layers = len(m.layers_by_kind[0])
    if num_dense_layers > 0 and m.ffn_hidden_size == 0:
        set_ones = [key for key in KINDS if getattr(m, key) != getattr(ModelConfig, key)]
        cause = said(recipe, f"{{model.{set_ones[0]}}}") if m.moe.num_experts else "model.moe.num_experts = 0"
        problem = f"model.ffn_hidden_size = 0, but {cause} makes {counted(num_dense_layers, 'layer')} dense"
        yield Problem(problem, steps=[m.hidden_size])


MODEL_RULES = rules_in(globals())
