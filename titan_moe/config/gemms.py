"""The modules of a model whose GEMMs may have a format, by name: known without building the model."""

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from titan_moe.config.formats import FORMAT_FACTS, Format
from titan_moe.config.model import ModelConfig
from titan_moe.config.modules import ALONE, Module, modules_of
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.precision import Part, PrecisionConfig
from titan_moe.config.recipe import Recipe

NEVER_ROUNDED = "embedding, head, router, norms, gates of shared experts and attention core"
"""What has no format in any recipe: few FLOPs, or sensitive (arXiv:2412.19437, section 3.3.1)."""


class GemmModule(NamedTuple):
    """A dense linear layer, or the routed experts of a layer."""

    layer: int
    path: str  # name inside the layer: `attention.qkv`
    part: Part
    widths: tuple[int, int]  # of a linear: input, output; of experts: row, hidden
    row: Module

    @property
    def name(self) -> str:
        """Name in the model: `layers.3.attention.qkv`."""
        return f"layers.{self.layer}.{self.path}"

    @property
    def pattern(self) -> str:
        """The pattern that the gate for speed writes into the recipe of a run: `layers.*.attention.qkv`."""
        return f"layers.*.{self.path}"


@lru_cache(maxsize=512)
def gemm_modules(model: ModelConfig, parallel: ParallelConfig = ALONE) -> tuple[GemmModule, ...]:
    """List the modules of all layers. The blocks of a `model.class` of one's own may lack some."""
    rows = [(row.path, row.part, row.widths, row) for row in modules_of(model, parallel) if row.part]
    return tuple(GemmModule(layer, *row) for layer in range(model.num_blocks) for row in rows if row[-1].is_in(layer))


def why_kept(recipe: Recipe, module: GemmModule) -> str:
    """Why a module has no format, by the recipe or by its widths; empty if it has that of its part."""
    by_name = _why_kept_by_name(recipe, module.layer, module.path)
    return by_name or _why_kept_by_width(recipe, module.part, module.widths, widths_of_a_rank(recipe, module))


def _why_kept_by_name(recipe: Recipe, layer: int, path: str) -> str:
    p = recipe.precision
    if layer < p.num_layers_at_start_in_compute:
        return f"num_layers_at_start_in_compute = {p.num_layers_at_start_in_compute}"
    if p.num_layers_at_end_in_compute and layer >= recipe.model.num_layers - p.num_layers_at_end_in_compute:
        return f"num_layers_at_end_in_compute = {p.num_layers_at_end_in_compute}"
    pattern = matches(p.modules_in_compute, f"layers.{layer}.{path}")
    return f'modules_in_compute: "{pattern}"' if pattern else ""


def _why_kept_by_width(recipe: Recipe, part: Part, widths: tuple[int, int], own_widths: tuple[int, int]) -> str:
    step = multiple_of(recipe.precision, recipe.precision.format_of(part))
    for width, own in zip(widths, own_widths, strict=True):
        if own % step:
            of_it = f", of which a rank has {own}," if own != width else ""
            return f"width {width}{of_it} is no multiple of {step}"
    return ""


def widths_of_a_rank(recipe: Recipe, module: GemmModule) -> tuple[int, int]:
    """The widths that a rank multiplies with: its part where `tp`, `etp` or exchanged heads split them."""
    rows = modules_of(recipe.model, recipe.parallel)
    return next(row.own_widths for row in rows if row.path == module.path and row.is_in(module.layer))


def multiple_of(precision: PrecisionConfig, name: Format) -> int:
    """What widths and tokens of a format must be multiples of."""
    facts = FORMAT_FACTS[name]
    return facts.multiple if precision.backend == "emulated" else facts.native_multiple


def expert_formats(recipe: Recipe) -> set[Format]:
    """The formats of the experts of all layers, `compute` for those that have none."""
    return set(_experts_by_format(recipe))


def _experts_by_format(recipe: Recipe) -> Mapping[Format, int]:
    """The number of layers whose experts have each format."""
    chosen = recipe.precision.format_of("experts")
    if chosen == "compute":
        return {chosen: recipe.model.num_moe_layers}
    formats = Counter[Format]()
    for row in modules_of(recipe.model, recipe.parallel):
        if row.part == "experts" and row.layers is not None:
            is_narrow = _why_kept_by_width(recipe, row.part, row.widths, row.own_widths)
            has_format = (not (is_narrow or _why_kept_by_name(recipe, layer, row.path)) for layer in row.layers)
            formats[chosen] += (number := sum(has_format))
            formats["compute"] += row.number - number
    return +formats  # without those that no layer has


def has_native_experts(recipe: Recipe) -> bool:
    """Whether routed experts of some layers have a format, and matrix units for it."""
    return count_native_experts(recipe) > 0


def count_native_experts(recipe: Recipe) -> int:
    """Count the layers whose routed experts have a format, and matrix units for it."""
    if recipe.run.device == "cpu" or recipe.precision.backend == "emulated":
        return 0
    return sum(number for name, number in _experts_by_format(recipe).items() if name != "compute")


def count_packed_experts(recipe: Recipe) -> int:
    """Count those whose rows and hidden states are kept as packed codes: all that fused experts can compute."""
    return 0 if unmet_needs_of_fused(recipe) else count_native_experts(recipe)


def unmet_needs_of_fused(recipe: Recipe) -> list[str]:
    """Settings that fused experts need and that these are not. Those in formats add no biases."""
    moe = recipe.model.moe
    if not moe.expert_mlp_bias or not has_native_experts(recipe):
        return moe.unmet_needs_of_fused
    chosen = recipe.precision.format_of("experts")
    return [*moe.unmet_needs_of_fused, f'model.moe.expert_mlp_bias = false with precision.experts = "{chosen}"']


def matches(patterns: tuple[str, ...], name: str) -> str:
    """The first pattern that fits a module's name; empty if none does."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), "")
