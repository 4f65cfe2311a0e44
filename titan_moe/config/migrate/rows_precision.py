"""How dtypes, formats and optimizers of others become `[precision]` and `optim.kind`, a row for each value that is not
simply another name."""

from collections.abc import Mapping
from typing import Any

from titan_moe.config.migrate.given import Given, NoCounterpart, Noted, Row, Unreadable

DTYPES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "fp8": "fp8",
    "uint8": "fp8",
    "float64": "fp64",
}
"""Names of dtypes -> ours."""
EXPERTS_BY_ROW = "fp8_tensorwise is for linear layers; experts have a scale for each row"
TENSORWISE = {"precision.linears": "fp8_tensorwise", "precision.experts": Noted("fp8_rowwise", EXPERTS_BY_ROW)}
FP8_RECIPES: Mapping[str, Mapping[str, Any]] = {
    "delayed": TENSORWISE | {"precision.linears": Noted("fp8_tensorwise", "scales of the tensor, not of past ones")},
    "tensorwise": TENSORWISE,
    "current": TENSORWISE,
    "blockwise": {"precision.format": "fp8_blockwise"},
    "rowwise": {"precision.format": "fp8_rowwise"},
    "mxfp8": {"precision.format": "mxfp8"},
}  # fmt: skip
"""Megatron's fp8 recipes."""
MIXED_PRECISION = {
    "bf16_mixed": "",
    "bf16_with_fp8_delayed_scaling_mixed": "delayed",
    "bf16_with_fp8_current_scaling_mixed": "current",
    "bf16_with_fp8_subchannel_scaling_mixed": "blockwise",
    "bf16_with_mxfp8_mixed": "mxfp8",
}
"""Megatron-Bridge's names -> Megatron's fp8 recipe."""


def _compute(given: Given) -> Mapping[str, Any]:
    is_bf16 = given.flag("bf16")
    if given.flag("fp16"):
        if is_bf16 and given["bf16"].line:
            raise Unreadable(given["fp16"], f"left out beside {given['bf16'].place}")
        raise NoCounterpart("precision.compute is bf16 or fp32, which need no scaling of the loss")
    return {"precision.compute": "bf16" if is_bf16 else "fp32"} if "bf16" in given else {}


def _mixed(given: Given) -> Mapping[str, Any]:
    named = given.word("mixed_precision")
    if named not in MIXED_PRECISION:
        raise NoCounterpart("take precision.compute and precision.format")
    return {"precision.compute": "bf16", **FP8_RECIPES.get(MIXED_PRECISION[named], {})}


def _params(given: Given) -> Mapping[str, Any]:
    """Of working weights; masters have a field of their own."""
    named = DTYPES.get(given.word("params_dtype"))
    if named is None:
        raise NoCounterpart("precision.compute is bf16 or fp32")
    return {} if "bf16" in given else {"precision.compute": named}


def _fp8(given: Given) -> Mapping[str, Any]:
    if given.raw("fp4", given.raw("fp4_format")):
        return {"precision.format": "nvfp4"}
    if not given.raw("fp8", given.raw("fp8_format")):
        return {}
    named = given.word("fp8_recipe", "delayed")
    if named not in FP8_RECIPES:
        raise NoCounterpart(f"precision.format has no {named}; {', '.join(FP8_RECIPES)} are known of Megatron")
    return FP8_RECIPES[named]


LINEAR_FORMATS = {
    "tensorwise": "fp8_tensorwise",
    "rowwise": "fp8_rowwise",
    "rowwise_with_gw_hp": "fp8_rowwise",
    "mxfp8_cublas": "mxfp8",
    "mxfp8_cublas_rceil": "mxfp8",
    "mxfp8_emulated": "mxfp8",
}
"""torchtitan's recipes of linear layers -> formats."""
LINEARS = {"quantize.linear.float8": "tensorwise", "quantize.linear.mx": "mxfp8_cublas"}
"""Converter -> the recipe that it takes without another one."""
EXPERTS = {"quantize.grouped_mm.float8": "fp8_rowwise", "quantize.grouped_mm.mx": "mxfp8"}
"""Converter -> the format of experts."""


def _converters(given: Given) -> Mapping[str, Any]:
    """Formats of torchtitan hold where a converter is named."""
    named = given.words("model.converters", given.words("converters"))
    values: dict[str, Any] = {}
    for converter, default in LINEARS.items():
        if converter in named:
            recipe = given.word(f"{converter}.recipe_name", default)
            if recipe not in LINEAR_FORMATS:
                raise Unreadable(given[f"{converter}.recipe_name"], f"one of {', '.join(LINEAR_FORMATS)}")
            values["precision.linears"] = LINEAR_FORMATS[recipe]
            if recipe == "rowwise_with_gw_hp":
                values["precision.wgrad"] = "compute"
    for converter, wanted in EXPERTS.items():
        if converter in named:
            values["precision.experts"] = wanted
    if unknown := [name for name in named if name not in LINEARS and name not in EXPERTS]:
        raise NoCounterpart(f"{', '.join(unknown)}: not built here; take precision.format", values)
    return values


NEVER_ROUNDED = {"output", "router.gate", "gate", "auto_filter_small_kn"}
"""Filters of torchtitan that name what has no format here, or what precision.only_where_faster chooses."""


FILTERS = "quantize.linear.float8.filter_fqns quantize.linear.mx.filter_fqns filter_fqns"


def _filters(given: Given) -> Mapping[str, Any]:
    named = [word for name in FILTERS.split() for word in given.words(name)]
    if others := [name for name in named if name not in NEVER_ROUNDED]:
        raise NoCounterpart(f"precision.modules_in_compute takes patterns of our names, for {', '.join(others)}")
    return {}


KINDS = {"adam": "adamw", "adamw": "adamw", "muon": "muon", "dist_muon": "muon"}
"""Optimizers -> optim.kind."""


def _optimizer(given: Given) -> Mapping[str, Any]:
    """Moments, gradients and masters in dtypes of their own need the fused kernel."""
    named = given.word("optimizer", given.word("optimizer.name", "adam"))
    if named not in KINDS:
        raise NoCounterpart(f"{named} is not built here; optim.kind takes adamw, fused_adamw and muon")
    values: dict[str, Any] = {}
    moments = {_dtype(given, name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if name in given}
    if moments:
        values["precision.moments"] = sorted(moments)[0]
        if len(moments) > 1:
            values["precision.moments"] = Noted(sorted(moments)[0], "both moments have one dtype here")
    if "main_grads_dtype" in given:
        values["precision.gradients"] = _dtype(given, "main_grads_dtype")
    if "main_params_dtype" in given and _dtype(given, "main_params_dtype") != "fp32":
        values["precision.master"] = _dtype(given, "main_params_dtype")
    if given.flag("store_param_remainders"):
        values["precision.master"] = "fp32_split"
    values = {key: value for key, value in values.items() if value != "fp32"}  # as that of the masters
    needs_fused = values and KINDS[named] == "adamw"
    return {"optim.kind": "fused_adamw" if needs_fused else KINDS[named], **values}


def _dtype(given: Given, name: str) -> str:
    named = DTYPES.get(given.word(name))
    if named is None:
        raise NoCounterpart(f"{given[name].in_words} is no dtype of masters, gradients or moments here")
    return named


ROWS = (
    Row("bf16 fp16", _compute),
    Row("mixed_precision", _mixed),
    Row("params_dtype", _params),
    Row("fp8 fp8_format fp8_recipe fp4 fp4_format fp4_recipe", _fp8),
    Row(
        "model.converters converters quantize.linear.float8.recipe_name quantize.linear.mx.recipe_name "
        "quantize.grouped_mm.float8.fqns quantize.grouped_mm.mx.fqns quantize.grouped_mm.mx.recipe_name",
        _converters,
    ),
    Row(FILTERS, _filters),
    Row(
        "optimizer optimizer.name exp_avg_dtype exp_avg_sq_dtype main_grads_dtype main_params_dtype "
        "store_param_remainders",
        _optimizer,
    ),
)
