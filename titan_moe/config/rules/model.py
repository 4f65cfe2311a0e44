"""Rules of the model's shape, on any device."""

from collections.abc import Iterator

from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, rule, rules_in
from titan_moe.config.schema import counted


@rule("the class is imported by this name", "model.class")
def class_is_addressable(recipe: Recipe, world_size: int) -> Iterator[str]:
    module, _, name = recipe.model.class_.partition(":")
    if not (all(part.isidentifier() for part in module.split(".")) and name.isidentifier()):
        yield f'model.class = "{recipe.model.class_}" must read "package.module:Class"'


@rule("the default class is described already", "model.table class")
def table_is_of_a_class(recipe: Recipe, world_size: int) -> Iterator[str]:
    m = recipe.model
    if m.table and m.class_ == ModelConfig.class_:
        yield f'model.table = "{m.table}" describes a model.class of your own, and the class is the default'


@rule(
    "tied embeddings are the weight of the head, whose deviation is init_std",
    "model.embedding_init_std embeddings_are_tied",
)
def tied_embeddings_have_one_deviation(recipe: Recipe, world_size: int) -> Iterator[str]:
    m = recipe.model
    if m.embeddings_are_tied and m.embedding_init_std not in (ModelConfig.embedding_init_std, m.init_std):
        yield (
            f"model.embedding_init_std = {m.embedding_init_std:g} has no effect with model.embeddings_are_tied = true"
        )


@rule("tied embeddings are the weight of the head, which decays", "optim.embeddings_decay model.embeddings_are_tied")
def tied_embeddings_decay(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.model.embeddings_are_tied and not recipe.optim.embeddings_decay:
        yield "optim.embeddings_decay = false has no effect with model.embeddings_are_tied = true"


@rule("a pattern of windowed and full layers has both", "model.attention.full_attention_every sliding_window")
def full_layers_are_some_of_the_layers(recipe: Recipe, world_size: int) -> Iterator[str]:
    a, num_layers = recipe.model.attention, recipe.model.num_layers
    if a.full_attention_every > 0 and a.sliding_window == 0:
        yield (
            f"model.attention.full_attention_every = {a.full_attention_every} needs windows in the other layers, but "
            "model.attention.sliding_window = 0"
        )
    elif a.full_attention_every == 1:
        yield (
            "model.attention.full_attention_every = 1 leaves no layer to model.attention.sliding_window = "
            f"{a.sliding_window}"
        )
    elif a.full_attention_every > num_layers:
        yield (
            f"model.attention.full_attention_every = {a.full_attention_every} exceeds model.num_layers = {num_layers}, "
            "so every layer has a window"
        )


@rule("the dense layers are the first layers of the model", "model.num_dense_layers num_layers")
def dense_layers_fit(recipe: Recipe, world_size: int) -> Iterator[str]:
    m = recipe.model
    if m.num_dense_layers > m.num_layers:
        yield f"model.num_dense_layers = {m.num_dense_layers} exceeds model.num_layers = {m.num_layers}"


@rule(
    "a feed-forward layer of width 0 computes nothing", "model.ffn_hidden_size num_dense_layers model.moe.num_experts"
)
def dense_layers_have_a_width(recipe: Recipe, world_size: int) -> Iterator[str]:
    m = recipe.model
    num_dense_layers = m.num_layers - m.num_moe_layers
    if num_dense_layers > 0 and m.ffn_hidden_size == 0:
        cause = f"num_dense_layers = {m.num_dense_layers}" if m.moe.num_experts else "moe.num_experts = 0"
        problem = f"model.ffn_hidden_size = 0, but model.{cause} makes {counted(num_dense_layers, 'layer')} dense"
        yield Problem(problem, steps=[m.hidden_size])


MODEL_RULES = rules_in(globals())
