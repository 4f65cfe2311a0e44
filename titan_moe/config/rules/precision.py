"""Rules of low-precision formats: supported combinations, and options that would have no effect."""

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import replace

from titan_moe.config.arena import experts_of
from titan_moe.config.formats import FORMAT_FACTS, GemmFormats
from titan_moe.config.gemms import (
    GemmModule,
    expert_formats,
    gemm_modules,
    has_native_experts,
    multiple_of,
    unmet_needs_of_fused,
    why_kept,
)
from titan_moe.config.precision import PARTS, PrecisionConfig
from titan_moe.config.recipe import Recipe, microbatch_tokens
from titan_moe.config.rules.rule import Problem, row, rule, rules_in
from titan_moe.config.schema import in_toml

DEFAULTS = PrecisionConfig()
IN_TRITON = [GemmFormats(*(name,) * 3) for name, facts in FORMAT_FACTS.items() if facts.has_linears_in_triton]
OPTIONS_OF_FORMATS = (
    "dgrad",
    "wgrad",
    "num_layers_at_start_in_compute",
    "num_layers_at_end_in_compute",
    "modules_in_compute",
)
"""Not `only_where_faster` and `backend`: the recipe of a run has them resolved."""


@rule(
    "an option without effect hides a mistake",
    "precision.format dgrad wgrad num_layers_at_start_in_compute num_layers_at_end_in_compute modules_in_compute",
)
def options_of_formats_need_a_format(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.precision
    changed = [name for name in OPTIONS_OF_FORMATS if getattr(p, name) != getattr(DEFAULTS, name)]
    if changed and not p.formats:
        settings = ", ".join(f"precision.{name} = {in_toml(getattr(p, name))}" for name in changed)
        yield f"{settings} needs a format, but the recipe has none"


formats_have_experts = row(
    "a model without such layers has nothing to round",
    lambda r: r.precision.experts not in ("format", "compute") and r.model.num_moe_layers <= 0,
    "{precision.experts} needs layers with experts, and this model has none",
)


@rule(
    "native formats round bf16 operands; the digits of wider dtypes would be lost",
    "precision.compute backend format experts linears",
)
def formats_round_from_bf16(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.precision
    is_emulated_fp32 = p.compute == "fp32" and p.backend == "emulated"
    if p.formats and p.compute != "bf16" and not is_emulated_fp32:
        yield f'precision.compute = "{p.compute}" cannot be rounded to {" and ".join(p.formats)}'


@rule("a CPU has no native low-precision GEMMs", "precision.backend format experts linears run.device")
def native_formats_are_on_gpus(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.precision
    if p.formats and p.backend != "emulated" and recipe.run.device == "cpu":
        formats = " and ".join(p.formats)
        yield f'precision.backend = "{p.backend}" does not compute {formats} with run.device = "cpu"'


@rule("native formats need kernels", "precision.backend format experts linears dgrad wgrad")
def native_formats_have_kernels(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.precision
    if p.backend == "emulated" or recipe.run.device == "cpu":
        return
    for part in PARTS:
        name, fact = p.format_of(part), f"has_native_{part}"
        has_part = part == "linears" or recipe.model.num_moe_layers > 0
        if name != "compute" and has_part and not getattr(FORMAT_FACTS[name], fact):
            yield f'precision.{part} = "{name}" has no native kernels yet'
    name = p.format_of("linears")
    if name == "fp8_blockwise" and "compute" in (p.dgrad, p.wgrad):
        key = "dgrad" if p.dgrad == "compute" else "wgrad"
        yield (
            f'precision.linears = "{name}" has native kernels for all three GEMMs together only, so precision.{key} = '
            '"compute" is not supported'
        )


@rule("the reference is plain PyTorch", "precision.backend linears format perf.kernels")
def native_linears_are_triton(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.precision
    formats = p.gemm_formats("linears")
    is_native = p.backend != "emulated" and recipe.run.device != "cpu"
    if recipe.perf.kernels == "reference" and is_native and formats in IN_TRITON:
        yield (
            f'perf.kernels = "reference" has no native kernels of dense linear layers in {formats}, which are Triton'
        )


@rule(
    "fp8 kernels of experts are Triton's, fused where experts can be, and always round gradients of rows",
    "perf.kernels perf.override.experts precision.experts format backend dgrad model.moe.score_on expert_mlp_bias",
)
def native_experts_are_triton(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.precision
    if not has_native_experts(recipe):
        return
    setting, needs = f'precision.experts = "{p.format_of("experts")}"', unmet_needs_of_fused(recipe)
    if (experts := experts_of(recipe)) != "fused" and (experts == "reference" or not needs):
        yield f'{setting} has no native kernels with "{experts}" experts'
    if p.dgrad == "compute":
        yield f'{setting} does not support precision.dgrad = "compute"'


@rule(
    "grouped GEMMs with rounded operands take the place of the experts' kernels",
    "perf.kernels perf.override.experts parallel.overlap precision.experts format backend",
)
def emulated_experts_are_composite(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, experts = recipe.precision, recipe.perf.chosen_kernels.experts
    if recipe.model.num_moe_layers <= 0 or expert_formats(recipe) == {"compute"} or p.backend != "emulated":
        return
    setting = f'precision.experts = "{p.format_of("experts")}" with precision.backend = "emulated"'
    if experts == "fused":
        yield f"{setting} replaces fused experts"
    elif recipe.parallel.overlap == "tile":
        yield f'{setting} has no parallel.overlap = "tile", which moves rows in the GEMMs of fused experts'


@rule(
    "a block of elements shares a scale, and tensor cores compute whole blocks",
    "train.seq_len_tokens micro_batch_sequences precision.wgrad",
)
def tokens_are_aligned(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, parallel, num_tokens = recipe.precision, recipe.parallel, microbatch_tokens(recipe)
    split = " / (cp * tp)" if parallel.cp * parallel.tp > 1 else ""
    formats = [name for name in p.formats if name == p.format_of("linears")]
    if p.backend != "emulated":
        formats = [name for name in formats if not FORMAT_FACTS[name].takes_any_tokens]
    for name in formats if p.wgrad == "format" else []:
        step = multiple_of(p, name)
        if num_tokens % step:
            yield Problem(
                f"train.micro_batch_sequences * seq_len_tokens{split} = {num_tokens} is not a multiple of {step}, "
                f"which weight gradients in {name} need",
                steps=[step],
            )


@rule("a misspelt pattern would have no effect", "precision.modules_in_compute")
def patterns_fit_modules(recipe: Recipe, world_size: int) -> Iterator[str]:
    patterns = recipe.precision.modules_in_compute
    modules = gemm_modules(recipe.model) if patterns else ()
    names = [module.name for module in modules]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            paths = dict.fromkeys(module.path for module in modules)
            yield (
                f"precision.modules_in_compute = [{in_toml(pattern)}] matches no module; the modules are layers.0 to "
                f"layers.{recipe.model.num_blocks - 1}, each with some of {', '.join(paths)}; router, head and "
                "embedding never have a format"
            )


@rule(
    "a format that no module gets hides a mistake",
    "precision.format experts linears num_layers_at_start_in_compute num_layers_at_end_in_compute modules_in_compute",
)
def some_modules_have_formats(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, num_layers = recipe.precision, recipe.model.num_layers
    num_kept = p.num_layers_at_start_in_compute + p.num_layers_at_end_in_compute
    if p.formats and num_kept >= num_layers:
        yield (
            f"precision.num_layers_at_start_in_compute + num_layers_at_end_in_compute = {num_kept} keep all of "
            f"model.num_layers = {num_layers}"
        )
    if not p.formats or num_kept >= num_layers:
        return
    modules = gemm_modules(recipe.model)
    asked = replace(recipe, precision=_without_patterns_of_the_gate(p, modules))
    for field, parts in p.fields_with_formats.items():
        of_parts = [module for module in modules if module.part in parts]
        if of_parts and all(why_kept(asked, module) for module in of_parts):
            paths_of: dict[str, dict[str, None]] = {}
            for module in of_parts:
                paths_of.setdefault(why_kept(asked, module), {})[module.path] = None
            reasons = "; ".join(f"{reason} ({', '.join(paths)})" for reason, paths in paths_of.items())
            yield f'precision.{field} = "{getattr(p, field)}" is the format of no module: {reasons}'


def _without_patterns_of_the_gate(p: PrecisionConfig, modules: Iterable[GemmModule]) -> PrecisionConfig:
    """The formats that were asked for: a run in which all of them are slower can be resumed."""
    if p.only_where_faster:
        return p
    of_gate = {module.pattern for module in modules}
    return replace(p, modules_in_compute=tuple(it for it in p.modules_in_compute if it not in of_gate))


PRECISION_RULES = rules_in(globals())
