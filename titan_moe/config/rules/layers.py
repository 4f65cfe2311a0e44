"""The rules that layers keep by themselves, in a model that no recipe describes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.perf import PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.attention import ATTENTION_RULES
from titan_moe.config.rules.model import MODEL_RULES
from titan_moe.config.rules.moe import MOE_RULES
from titan_moe.config.rules.perf import expert_rows_are_aligned, unaligned_expert_rows
from titan_moe.config.rules.ranges import numbers_out_of_range
from titan_moe.config.rules.rule import Rule
from titan_moe.config.schema import Key, in_toml, keys_of, type_in_words

SECTIONS = {"model": ModelConfig, "model.attention": AttentionConfig, "model.moe": MoEConfig, "kernels": Kernels}
"""Fields that a derived class adds are its own."""
NUMBERS = {int: Integral, float: Real}


def check_moe(config: ModelConfig, kernels: Kernels) -> None:
    """Refuse a config of which no mixture-of-experts layer can be built.

    Raises: ValueError with all problems and their ways out.
    """
    _refuse(_wrong_values({"model": config, "model.moe": config.moe, "kernels": kernels}))
    _refuse([*_breaches(config, ["model", "model.moe"], MOE_RULES), *_obstacles_to_experts(config, kernels)])


def check_attention(config: ModelConfig, kernels: Kernels) -> None:
    """Refuse a config of which no attention layer can be built.

    Raises: ValueError with all problems and their ways out.
    """
    _refuse(_wrong_values({"model": config, "model.attention": config.attention, "kernels": kernels}))
    _refuse(_breaches(config, ["model", "model.attention"], ATTENTION_RULES))


def check_model(config: ModelConfig, kernels: Kernels) -> None:
    """Refuse a config of which no whole model can be built.

    Raises: ValueError with all problems and their ways out.
    """
    sections = {"model": config, "model.attention": config.attention, "model.moe": config.moe}
    _refuse(_wrong_values({**sections, "kernels": kernels}))
    of_experts = _obstacles_to_experts(config, kernels) if config.num_moe_layers > 0 else ()
    _refuse([*_breaches(config, [*sections], [*MODEL_RULES, *ATTENTION_RULES, *MOE_RULES]), *of_experts])


def _wrong_values(sections: Mapping[str, Any]) -> Iterator[str]:
    """Values of another type, or that are none of the choices."""
    for name, section in sections.items():
        for key in keys_of(SECTIONS[name], f"{name}."):
            value = getattr(section, key.attribute)
            if not key.is_section and not _fits(key, value):
                yield f"{key.dotted} = {in_toml(value)} must be {type_in_words(key)}"


def _fits(key: Key, value: Any) -> bool:
    if key.choices:
        return value in list(key.choices)
    return isinstance(value, NUMBERS.get(key.type, key.type))


def _breaches(config: ModelConfig, sections: Sequence[str], rules: Sequence[Rule]) -> Iterator[str]:
    recipe = Recipe(model=config)
    yield from numbers_out_of_range(recipe, sections)
    for rule in rules:
        yield from (f"{message} ({rule.why})" for message in rule.check(recipe, 1))


def _obstacles_to_experts(config: ModelConfig, kernels: Kernels) -> Iterator[str]:
    if config.moe.num_experts == 0:
        yield "model.moe.num_experts = 0, and a MoE layer has experts; set their number"
    # in fp32: a layer gets its dtype after it is built, and no wider one has these kernels
    recipe = Recipe(model=config, perf=PerfConfig(kernels.experts), precision=PrecisionConfig("fp32"))
    for message in unaligned_expert_rows(recipe, "kernels.experts"):
        yield f"{message} ({expert_rows_are_aligned.why})"
    for need in config.moe.unmet_needs_of_fused if kernels.experts == "fused" else ():
        yield f'kernels.experts = "fused" needs {need}; change it, or take kernels.experts = "grouped_mm"'


def _refuse(problems: Iterable[str]) -> None:
    if problems := list(problems):
        raise ValueError("\n".join(problems))
