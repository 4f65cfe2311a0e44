"""The rules that layers keep by themselves, in a model that no recipe describes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from titan_moe.config.attention import AttentionConfig
from titan_moe.config.balance import AuxLosses
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.perf import PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.attention import ATTENTION_RULES
from titan_moe.config.rules.model import MODEL_RULES
from titan_moe.config.rules.moe import MOE_RULES
from titan_moe.config.rules.perf import expert_rows_are_aligned
from titan_moe.config.rules.ranges import numbers_are_in_range, numbers_out_of_range
from titan_moe.config.rules.rule import Rule, rule
from titan_moe.config.schema import Key, in_toml, keys_of, type_in_words, value_of
from titan_moe.config.ways_out import Search

SECTIONS = {
    "model": ModelConfig,
    "model.attention": AttentionConfig,
    "model.moe": MoEConfig,
    "model.moe.aux_losses": AuxLosses,
    "kernels": Kernels,
}
"""Fields that a derived class adds are its own."""
OF_MOE_SECTIONS = ["model.moe", "model.moe.aux_losses"]
NUMBERS = {int: Integral, float: Real}


@dataclass(frozen=True)
class Layers:
    """What a layer or a model is built of."""

    model: ModelConfig
    kernels: Kernels

    @property
    def recipe(self) -> Recipe:
        """A recipe with these fields. In fp32: a layer gets its dtype after it is built, and no wider one has kernels
        of experts."""
        return Recipe(model=self.model, perf=PerfConfig(self.kernels.experts), precision=PrecisionConfig("fp32"))


@rule("the router chooses among them", "model.moe.num_experts")
def moe_layers_have_experts(layers: Layers, world_size: int) -> Iterator[str]:
    if layers.model.moe.num_experts == 0:
        yield "model.moe.num_experts = 0, and a MoE layer has experts"


@rule(
    "rows are gathered inside a GEMM, where no score is applied",
    "kernels.experts model.moe.score_on",
)
def fused_experts_have_their_needs(layers: Layers, world_size: int) -> Iterator[str]:
    for need in layers.model.moe.unmet_needs_of_fused if layers.kernels.experts == "fused" else ():
        yield f'kernels.experts = "fused" needs {need}'


@rule("these kernels have no such option", "kernels.head router model.head_bias model.moe.score_fn router_dtype")
def triton_kernels_have_their_needs(layers: Layers, world_size: int) -> Iterator[str]:
    for name, need in layers.model.unmet_needs_of_triton.items():
        if getattr(layers.kernels, name) == "triton":
            yield f'kernels.{name} = "triton" needs {need}'


def _of_layers(of_recipe: Rule) -> Rule:
    """A rule of recipes where there is none."""
    fields = tuple(field.replace("perf.kernels", "kernels.experts") for field in of_recipe.fields)
    return replace(of_recipe, check=lambda layers, world_size: of_recipe.check(layers.recipe, 1), fields=fields)


OF_EXPERTS = [_of_layers(expert_rows_are_aligned), fused_experts_have_their_needs]
OF_MOE = [*map(_of_layers, MOE_RULES), moe_layers_have_experts, triton_kernels_have_their_needs, *OF_EXPERTS]
OF_ATTENTION = [*map(_of_layers, ATTENTION_RULES)]
OF_A_MODEL = [*map(_of_layers, [*MODEL_RULES, *ATTENTION_RULES, *MOE_RULES]), triton_kernels_have_their_needs]


def check_moe(config: ModelConfig, kernels: Kernels) -> None:
    """Refuse a config of which no mixture-of-experts layer can be built.

    Raises: ValueError with all problems and their ways out.
    """
    _refuse(Layers(config, kernels), OF_MOE_SECTIONS, OF_MOE)


def check_attention(config: ModelConfig, kernels: Kernels) -> None:
    """Refuse a config of which no attention layer can be built.

    Raises: ValueError with all problems and their ways out.
    """
    _refuse(Layers(config, kernels), ["model.attention"], OF_ATTENTION)


def check_model(config: ModelConfig, kernels: Kernels) -> None:
    """Refuse a config of which no whole model can be built.

    Raises: ValueError with all problems and their ways out.
    """
    rules = [*OF_A_MODEL, *OF_EXPERTS] if config.num_moe_layers > 0 else OF_A_MODEL
    _refuse(Layers(config, kernels), ["model.attention", *OF_MOE_SECTIONS], rules)


def _refuse(layers: Layers, parts: list[str], rules: list[Rule]) -> None:
    sections = ["model", *parts]
    ranges = replace(
        numbers_are_in_range, check=lambda changed, world_size: numbers_out_of_range(changed.recipe, sections)
    )
    search = Search(layers, lambda changed: [ranges, *rules], lambda changed: 1)
    if problems := list(_wrong_values(layers, [*sections, "kernels"])) or search.refusals():
        raise ValueError("\n".join(problems))


def _wrong_values(layers: Layers, sections: list[str]) -> Iterator[str]:
    """Values of another type, or that are none of the choices."""
    for name in sections:
        for key in keys_of(SECTIONS[name], f"{name}."):
            value = value_of(layers, key.dotted)
            if not key.is_section and not _fits(key, value):
                yield f"{key.dotted} = {in_toml(value)} must be {type_in_words(key)}"


def _fits(key: Key, value: Any) -> bool:
    if key.choices:
        return value in list(key.choices)
    if key.is_list:
        return isinstance(value, tuple) and all(
            isinstance(entry, NUMBERS.get(key.entry_type, key.entry_type)) for entry in value
        )
    return isinstance(value, NUMBERS.get(key.type, key.type))
