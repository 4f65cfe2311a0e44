"""The modules of a model whose GEMMs may have a format, by name: known without building the model."""

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from titan_moe.config.formats import FORMAT_FACTS, Format
from titan_moe.config.model import ModelConfig
from titan_moe.config.precision import Part, PrecisionConfig
from titan_moe.config.recipe import Recipe

NEVER_ROUNDED = "embedding, head, router, norms, gates and attention core"
"""What has no format in any recipe: few FLOPs, or sensitive (arXiv:2412.19437, section 3.3.1)."""


class GemmModule(NamedTuple):
    """A dense linear layer, or the routed experts of a layer."""

    layer: int
    path: str  # name inside the layer: `attention.qkv`
    part: Part
    widths: tuple[int, int]  # of a linear: input, output; of experts: row, hidden

    @property
    def name(self) -> str:
        """Name in the model: `layers.3.attention.qkv`."""
        return f"layers.{self.layer}.{self.path}"

    @property
    def pattern(self) -> str:
        """The pattern that the gate for speed writes into the recipe of a run: `layers.*.attention.qkv`."""
        return f"layers.*.{self.path}"


SPLIT_OUTPUTS, SPLIT_INPUTS = ("q_up", "kv_up", "gate_up"), ("out", "down")
"""Linear layers of which each tp rank has a part, beside `qkv`."""


def gemm_modules(model: ModelConfig) -> list[GemmModule]:
    """List the modules of all layers. The blocks of a `model.class` of one's own may lack some."""
    return [
        GemmModule(layer, path, part, widths)
        for layer in range(model.num_layers)
        for path, part, widths in _of_a_block(model, is_dense=layer < model.num_layers - model.num_moe_layers)
    ]


def why_kept(recipe: Recipe, module: GemmModule) -> str:
    """Why a module has no format, by the recipe or by its widths; empty if it has that of its part."""
    p = recipe.precision
    if module.layer < p.num_layers_at_start_in_compute:
        return f"num_layers_at_start_in_compute = {p.num_layers_at_start_in_compute}"
    if module.layer >= recipe.model.num_layers - p.num_layers_at_end_in_compute:
        return f"num_layers_at_end_in_compute = {p.num_layers_at_end_in_compute}"
    if pattern := matches(p.modules_in_compute, module.name):
        return f'modules_in_compute: "{pattern}"'
    step = multiple_of(p, p.format_of(module.part))
    for width, own in zip(module.widths, widths_of_a_rank(recipe, module), strict=True):
        if own % step:
            part = f", of which a rank has {own}," if own != width else ""
            return f"width {width}{part} is no multiple of {step}"
    return ""


def widths_of_a_rank(recipe: Recipe, module: GemmModule) -> tuple[int, int]:
    """The widths that a rank multiplies with: its part where `tp`, `etp` or exchanged heads split them."""
    p, a, (inputs, outputs) = recipe.parallel, recipe.model.attention, module.widths
    if module.part == "experts":
        return inputs, outputs // max(p.etp, 1)
    name, tp = module.path.rpartition(".")[2], max(p.tp, 1)
    if name == "qkv":  # ranks may share a key/value head
        return inputs, (a.num_heads // tp + 2 * max(a.num_kv_heads // tp, 1)) * a.head_dim
    if name in SPLIT_INPUTS:
        return inputs // tp, outputs
    if name == "kv_up" and p.cp_kind == "ulysses":
        tp *= max(p.cp, 1)
    return inputs, outputs // tp if name in SPLIT_OUTPUTS else outputs


def multiple_of(precision: PrecisionConfig, name: Format) -> int:
    """What widths and tokens of a format must be multiples of."""
    facts = FORMAT_FACTS[name]
    return facts.multiple if precision.backend == "emulated" else facts.native_multiple


def expert_formats(recipe: Recipe) -> set[Format]:
    """The formats of the experts of all layers, `compute` for those that have none."""
    return set(_experts_by_format(recipe))


def _experts_by_format(recipe: Recipe) -> Counter[Format]:
    """The number of layers whose experts have each format."""
    chosen = recipe.precision.format_of("experts")
    if chosen == "compute":
        return Counter({chosen: recipe.model.num_moe_layers})
    modules = [module for module in gemm_modules(recipe.model) if module.part == "experts"]
    return Counter("compute" if why_kept(recipe, module) else chosen for module in modules)


def has_native_experts(recipe: Recipe) -> bool:
    """Whether routed experts of some layers have a format, and matrix units for it."""
    return count_native_experts(recipe) > 0


def count_native_experts(recipe: Recipe) -> int:
    """Count the layers whose routed experts have a format, and matrix units for it."""
    if recipe.run.device == "cpu" or recipe.precision.backend == "emulated":
        return 0
    return sum(number for name, number in _experts_by_format(recipe).items() if name != "compute")


def matches(patterns: tuple[str, ...], name: str) -> str:
    """The first pattern that fits a module's name; empty if none does."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), "")


def _of_a_block(model: ModelConfig, *, is_dense: bool) -> Iterator[tuple[str, Part, tuple[int, int]]]:
    width, moe = model.hidden_size, model.moe
    for name, widths in _projections(model).items():
        yield f"attention.{name}", "linears", widths
    if is_dense:
        yield from _mlp("feed_forward", width, model.ffn_hidden_size)
        return
    row_width = model.expert_width
    if moe.latent_size:
        yield "feed_forward.latent_down", "linears", (width, row_width)
    yield "feed_forward.experts", "experts", (row_width, moe.ffn_hidden_size)
    if moe.latent_size:
        yield "feed_forward.latent_up", "linears", (row_width, width)
    if moe.shared_ffn_hidden_size:
        inner = ".mlp" if moe.shared_expert_gate else ""
        yield from _mlp(f"feed_forward.shared_experts{inner}", width, moe.shared_ffn_hidden_size)


def _projections(model: ModelConfig) -> dict[str, tuple[int, int]]:
    width, a = model.hidden_size, model.attention
    if a.kind == "gqa":
        return {
            "qkv": (width, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim),
            "out": (a.num_heads * a.head_dim, width),
        }
    return {
        **({"q_down": (width, a.q_lora_rank)} if a.q_lora_rank else {}),
        "q_up": (a.q_lora_rank or width, a.num_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim)),
        "kv_down": (width, a.kv_lora_rank + a.qk_rope_head_dim),
        "kv_up": (a.kv_lora_rank, a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)),
        "out": (a.num_heads * a.v_head_dim, width),
    }


def _mlp(path: str, width: int, hidden: int) -> Iterator[tuple[str, Part, tuple[int, int]]]:
    yield f"{path}.gate_up", "linears", (width, 2 * hidden)
    yield f"{path}.down", "linears", (hidden, width)
