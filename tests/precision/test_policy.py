"""The policy: what a model's modules become, by the names that floor 0 knows."""

import logging
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from titan_moe.config import Recipe, RecipeError
from titan_moe.config.formats import GemmFormats
from titan_moe.config.gemms import gemm_modules
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.swiglu import SwiGLU
from titan_moe.kernels.experts.composite_mlp import CompositeMLP
from titan_moe.kernels.experts.fp8.format import FP8_BLOCKWISE, FP8_ROWWISE
from titan_moe.kernels.experts.grouped_mm import GROUPED_GEMM
from titan_moe.kernels.linear.fp8_blocks import fp8_block_linear
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.mlp import SwiGLUDown
from titan_moe.models.transformer import Transformer
from titan_moe.plan.resolved import Resolved
from titan_moe.precision import experts
from titan_moe.precision.policy import convert

CPU = torch.device("cpu")
GQA = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=16, qkv_bias=True)
MLA = AttentionConfig(
    kind="mla", num_heads=2, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16
)
MOE = MoEConfig(num_experts=4, ffn_hidden_size=32, shared_ffn_hidden_size=48, latent_size=16, shared_expert_gate=True)
MODEL = ModelConfig(num_layers=3, num_dense_layers=1, hidden_size=32, ffn_hidden_size=64, attention=GQA, moe=MOE)
ROWWISE = GemmFormats("fp8_rowwise", "fp8_rowwise", "fp8_rowwise")


def build(model: ModelConfig = MODEL, **precision: object) -> tuple[nn.Module, Recipe]:
    recipe = Recipe(model=model, precision=PrecisionConfig(backend="emulated", **precision))
    with torch.device("meta"):
        return Transformer(model), recipe


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        replace(MODEL, attention=MLA, moe=replace(MOE, latent_size=0, shared_expert_gate=False)),
        replace(MODEL, attention=replace(MLA, q_lora_rank=0), moe=MoEConfig(), num_dense_layers=0),
    ],
    ids=["gqa and latent", "mla and shared", "dense"],
)
def test_names_and_widths_are_those_of_built_models(model: ModelConfig) -> None:
    built, _ = build(model)
    expected = {}
    for name, module in built.named_modules():
        if isinstance(module, GroupedExperts):
            expected[name] = (module.gate_up.shape[-1], module.gate_up.shape[-2])
        elif isinstance(module, nn.Linear) and name != "head" and not name.endswith("shared_experts.gate"):
            expected[name] = (module.in_features, module.out_features)
    assert {module.name: module.widths for module in gemm_modules(model)} == expected


def test_convert_swaps_linears_and_nothing_else() -> None:
    model, recipe = build(linears="fp8_rowwise", modules_in_compute=("layers.2.*",), num_layers_at_start_in_compute=1)
    before = {name: type(module) for name, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    converted = convert(model, Resolved(recipe, 1), CPU)
    assert converted == {name: ROWWISE for name in converted} == Resolved(recipe, 1).formats
    assert converted.keys() == {
        f"layers.1.{path}"
        for path in (
            "attention.qkv",
            "attention.out",
            "feed_forward.latent_down",
            "feed_forward.latent_up",
            "feed_forward.shared_experts.mlp.gate_up",
            "feed_forward.shared_experts.mlp.down",
        )
    }
    after = {name: type(module) for name, module in model.named_modules()}
    assert {name for name in before if after[name] is not before[name]} == converted.keys()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert list(dict(model.named_parameters())) == list(parameters)


def test_convert_without_formats_changes_nothing() -> None:
    model, recipe = build()
    before = list(model.modules())
    assert convert(model, Resolved(recipe, 1), CPU) == {} and list(model.modules()) == before


def test_convert_leaves_layers_of_ones_own_class_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Adapted(nn.Linear):
        pass

    model, recipe = build(linears="fp8_rowwise")
    model.layers["0"].attention.qkv = Adapted(32, 64)
    model.layers["1"].feed_forward.latent_up = nn.Identity()
    with caplog.at_level(logging.WARNING, "titan_moe"):
        converted = convert(model, Resolved(recipe, 1), CPU)
    assert isinstance(model.layers["0"].attention.qkv, Adapted)
    assert "layers.0.attention.qkv" not in converted and "layers.0.attention.out" in converted
    assert "Transformer has no such layer or one of its own class: layers.0.attention.qkv, layers.1." in caplog.text


def test_convert_refuses_a_device_without_matrix_units() -> None:
    model, recipe = build(linears="fp8_rowwise")
    native = replace(recipe, precision=replace(recipe.precision, backend="auto"))
    with pytest.raises(RecipeError, match='this device is no GPU; take precision.backend = "emulated"'):
        convert(model, Resolved(native, 1), CPU)
    assert type(model.layers["0"].feed_forward.down) is SwiGLUDown


def test_emulated_experts_are_the_composite_of_rounded_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "emulated_grouped_mm", lambda *options: options)
    monkeypatch.setattr(experts, "CompositeMLP", lambda *values: SimpleNamespace(values=values))
    formats = GemmFormats("fp8_rowwise", "fp8_rowwise", "compute")
    moe = replace(MOE, score_on="input", swiglu_limit=7.0)
    model, recipe = build(replace(MODEL, moe=moe), experts="fp8_rowwise", wgrad="compute")
    assert convert(model, Resolved(recipe, 1), CPU) == {
        f"layers.{layer}.feed_forward.experts": formats for layer in (1, 2)
    }
    expected = SimpleNamespace(values=((formats, True, False), True, SwiGLU(limit=7.0)))
    assert all(model.layers[layer].feed_forward.experts.mlp == expected for layer in "12")


@pytest.mark.parametrize(
    ("formats", "format"),
    [(ROWWISE, FP8_ROWWISE), (GemmFormats(*("fp8_blockwise",) * 3), FP8_BLOCKWISE)],
)
def test_native_experts_have_the_kernels_of_their_formats(formats: GemmFormats, format: Any) -> None:
    layer = GroupedExperts(2, 16, 16)
    experts.convert_experts(layer, formats, "native")
    assert layer.mlp.format is format and deepcopy(layer).mlp is layer.mlp


def test_native_blockwise_layers_are_those_of_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLA's among them; what has other widths stays as it is."""
    attention = replace(MLA, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
    moe = MoEConfig(num_experts=4, ffn_hidden_size=128, shared_ffn_hidden_size=384)
    model, recipe = build(replace(MODEL, hidden_size=256, ffn_hidden_size=320, attention=attention, moe=moe))
    precision = replace(recipe.precision, format="fp8_blockwise", backend="auto")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    converted = convert(model, Resolved(replace(recipe, precision=precision), 1), torch.device("cuda"))
    modules = dict(model.named_modules())
    linears = {name for name in converted if not name.endswith("experts")}
    assert all(modules[name].product is fp8_block_linear for name in linears)
    assert {name.removeprefix("layers.1.") for name in linears if name.startswith("layers.1.")} == {
        *("attention.q_down", "attention.kv_up", "attention.out"),
        *("feed_forward.shared_experts.gate_up", "feed_forward.shared_experts.down"),
    }
    assert type(modules["layers.0.feed_forward.down"]) is SwiGLUDown, "320 inputs"
    assert type(modules["layers.1.attention.q_up"]) is nn.Linear, "192 outputs"
    assert type(modules["layers.1.attention.kv_down"]) is nn.Linear, "160 outputs"


@pytest.mark.parametrize(("has_bias", "weighs_input"), [(True, False), (False, True)])
def test_native_experts_that_are_not_fused_are_composed(has_bias: bool, weighs_input: bool) -> None:
    layer = GroupedExperts(2, 16, 16, has_bias=has_bias)
    experts.convert_experts(layer, ROWWISE, "native", weighs_input=weighs_input)
    assert layer.mlp == CompositeMLP(GROUPED_GEMM["fp8_rowwise"], weighs_input)


def test_experts_without_kernels_are_refused() -> None:
    with pytest.raises(RecipeError, match='no native kernels; take precision.experts = "compute", or'):
        experts.convert_experts(GroupedExperts(2, 16, 16), replace(ROWWISE, dgrad="compute"), "native")
