"""Layers that are built without a recipe refuse what a recipe would."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.rules.layers import check_attention, check_model, check_moe

CONFIG = ModelConfig(hidden_size=64, moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=32))
CHECKS = {"model": check_model, "attention": check_attention, "moe": check_moe}

# section, change -> a part of the message
BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("moe", {"score_fn": "tanh"}, 'model.moe.score_fn = "tanh" must be one of "softmax", "sigmoid"'),
    ("moe", {"score_fn": ["softmax"]}, 'model.moe.score_fn = ["softmax"] must be one of'),
    ("moe", {"top_k": 2.0}, "model.moe.top_k = 2.0 must be an integer"),
    ("moe", {"aux_loss_coef": "0.1"}, 'model.moe.aux_loss_coef = "0.1" must be a number'),
    ("moe", {"aux_loss_coef": -1}, "model.moe.aux_loss_coef = -1 must be at least 0"),
    (
        "moe",
        {"top_k": 9},
        "(a token chooses an expert once); take model.moe.top_k = 8, 7, 6 or 5, or model.moe.num_experts",
    ),
    ("moe", {"num_groups": 3}, "model.moe.num_groups = 3 does not divide"),
    ("moe", {"ffn_hidden_size": 0}, "model.moe.ffn_hidden_size = 0, but MoE layers have 8 experts"),
    (
        "moe",
        {"ffn_hidden_size": 33},
        '16 bytes); take kernels.experts = "reference", or model.moe.ffn_hidden_size = 32, 36, 28 or 40',
    ),
    ("model", {"hidden_size": 63}, "model.hidden_size = 63 is not a multiple of 4"),
    ("attention", {"kind": "mha"}, 'model.attention.kind = "mha" must be one of "gqa", "mla"'),
    ("attention", {"num_kv_heads": 3}, "model.attention.num_kv_heads = 3 does not divide"),
    ("attention", {"qk_norm": "no"}, 'model.attention.qk_norm = "no" must be true or false'),
    ("kernels", {"experts": "foo"}, 'kernels.experts = "foo" must be one of "grouped_mm", "fused", "reference"'),
]


def changed(section: str, change: dict[str, Any]) -> tuple[ModelConfig, Kernels]:
    if section == "kernels":
        return CONFIG, Kernels(**change)
    if section == "model":
        return replace(CONFIG, **change), Kernels()
    return replace(CONFIG, **{section: replace(getattr(CONFIG, section), **change)}), Kernels()


def refusal(check: Callable[[ModelConfig, Kernels], None], config: ModelConfig, kernels: Kernels) -> str:
    with pytest.raises(ValueError) as refused:
        check(config, kernels)
    return str(refused.value)


@pytest.mark.parametrize(("section", "change", "expected"), BROKEN)
def test_layers_and_models_refuse_a_bad_config(section: str, change: dict[str, Any], expected: str) -> None:
    check = check_attention if section == "attention" else check_moe
    assert expected in refusal(check, *changed(section, change))
    assert expected in refusal(check_model, *changed(section, change))


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_good_config_passes(check: Callable[[ModelConfig, Kernels], None]) -> None:
    check(CONFIG, Kernels())
    check(replace(CONFIG, moe=replace(CONFIG.moe, aux_loss_coef=0)), Kernels())  # a number


def test_a_derived_config_has_fields_of_its_own() -> None:
    @dataclass(frozen=True)
    class Mine(ModelConfig):
        widths: tuple[int, ...] = (1,)

    for check in CHECKS.values():
        check(Mine(hidden_size=64, moe=CONFIG.moe), Kernels())


def test_all_problems_are_told() -> None:
    moe = replace(CONFIG.moe, top_k=9, num_groups=3, score_on="input")
    told = refusal(check_moe, replace(CONFIG, moe=moe), Kernels(experts="fused")).splitlines()
    assert len(told) == 3 and 'kernels.experts = "fused" needs model.moe.score_on = "activation"' in told[-1]


def test_each_layer_reads_its_own_part() -> None:
    dense = ModelConfig(hidden_size=63, ffn_hidden_size=32)
    check_model(dense, Kernels())
    all_dense = replace(CONFIG, num_dense_layers=CONFIG.num_layers, moe=replace(CONFIG.moe, score_on="input"))
    check_model(replace(all_dense, ffn_hidden_size=32), Kernels(experts="fused"))
    assert "model.moe.num_experts = 0, and a MoE layer has experts" in refusal(check_moe, dense, Kernels())
    check_attention(replace(CONFIG, moe=MoEConfig(top_k=0)), Kernels())
    check_moe(replace(CONFIG, hidden_size=63, attention=AttentionConfig(num_kv_heads=3)), Kernels(experts="reference"))
