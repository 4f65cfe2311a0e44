"""Properties of a model's layers that follow from its shape."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan_moe.config import check_rules, load_recipe
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.mtp import MTPConfig


@pytest.mark.parametrize(
    ("window", "full_every", "expected"),
    [
        (0, 0, [100] * 7),
        (8, 0, [8] * 7),  # Mistral
        (8, 2, [8, 100, 8, 100, 8, 100, 8]),  # gpt-oss
        (8, 6, [8, 8, 8, 8, 8, 100, 8]),  # Gemma 3
        (8, (4, 5, 6), [100, 100, 100, 100, 8, 8, 8]),  # dots1
        (8, (0, 3), [8, 100, 100, 8, 100, 100, 100]),
    ],
)
def test_window_of_each_layer(window: int, full_every: int | tuple[int, ...], expected: list[int]) -> None:
    key = "window_layers" if isinstance(full_every, tuple) else "full_attention_every"
    attention = AttentionConfig(sliding_window=window, **{key: full_every})
    assert [attention.window(layer, 100) for layer in range(7)] == expected
    assert attention.with_windows([window < 100 for window in expected]) == attention
    if window:
        assert replace(attention, sliding_window=1000).window(0, 100) == 100


def test_the_fewest_fields_say_which_layers_have_windows() -> None:
    listed = AttentionConfig(sliding_window=8, window_layers=(4, 0, 2))
    assert listed.with_windows([listed.has_window(layer) for layer in range(6)]) == AttentionConfig(
        sliding_window=8, full_attention_every=2
    )


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, "MMMMMMM"),
        ({"num_dense_layers": 2}, "ddMMMMM"),
        ({"moe_every": 2}, "dMdMdMd"),  # Llama 4
        ({"moe_every": 3, "num_dense_layers": 3}, "dddddMd"),  # Ernie 4.5
        ({"dense_layers": (6, 2)}, "MMdMMMd"),
        ({"moe_every": 2, "dense_layers": (3,), "num_dense_layers": 1}, "dMdddMd"),
        ({"moe": MoEConfig()}, "ddddddd"),
    ],
)
def test_kind_of_each_layer(fields: dict[str, Any], kinds: str) -> None:
    model = ModelConfig(**{"num_layers": 7, "moe": MoEConfig(num_experts=4), **fields})
    dense, moe = model.layers_by_kind
    assert [list(dense), list(moe)] == [[i for i, kind in enumerate(kinds) if kind == which] for which in "dM"]
    assert model.num_moe_layers == kinds.count("M")
    some = model.with_layers([2, 5, 6])
    assert some.num_layers == 3 and list(some.moe_layers) == [i for i, n in enumerate((2, 5, 6)) if kinds[n] == "M"]


@pytest.mark.parametrize(
    ("num_experts", "repeats", "kinds"), [(4, False, "dMdMM"), (4, True, "dMdM"), (0, False, "ddddd")]
)
def test_blocks_of_multi_token_prediction_are_behind_the_layers(num_experts: int, repeats: bool, kinds: str) -> None:
    mtp, moe = MTPConfig(2, repeats_layer=repeats), MoEConfig(num_experts=num_experts)
    model = ModelConfig(num_layers=3, moe_every=2, mtp=mtp, moe=moe)
    dense, of_moe = model.layers_by_kind
    assert [list(dense), list(of_moe)] == [[i for i, kind in enumerate(kinds) if kind == which] for which in "dM"]
    assert (model.num_blocks, list(model.mtp_layers)) == (len(kinds), list(range(3, len(kinds))))
    last, first = model.with_layers([2, *model.mtp_layers]), model.with_layers([0, 1])
    assert (last.num_layers, last.mtp, first.num_layers, first.mtp.num_depths) == (1, mtp, 2, 0)
    assert [i in last.moe_layers for i in range(last.num_blocks)] == [kind == "M" for kind in kinds[2:]]
    alone = model.with_layers(model.mtp_layers)
    assert (alone.num_layers, alone.num_blocks) == (0, len(kinds) - 3)


def test_models_with_the_same_kinds_of_layers_are_equal_with_all_of_them() -> None:
    model, layers = ModelConfig(num_layers=6, moe=MoEConfig(num_experts=4)), range(6)
    one, other = replace(model, moe_every=2, num_dense_layers=3), replace(model, dense_layers=(4, 2, 0, 1))
    assert one != other and one.with_layers(layers) == other.with_layers(layers)
    assert one.with_layers(layers) == one


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("--perf.kernels=grouped_mm", ""),
        ("--perf.kernels=fused", ""),
        (
            "--perf.kernels=fused --parallel.dispatcher=symm_mem --parallel.overlap=tile",
            "",
        ),
        (
            "--perf.kernels=fused --precision.experts=fp8_rowwise",
            'perf.kernels = "fused" needs model.moe.expert_mlp_bias = false with precision.experts = "fp8_rowwise"',
        ),
        (
            "--perf.kernels=grouped_mm --perf.override.experts=fused --precision.experts=fp8_rowwise "
            "--parallel.dispatcher=symm_mem --parallel.overlap=tile",
            'parallel.overlap = "tile" needs fused experts, which need model.moe.expert_mlp_bias = false with',
        ),
        ("--model.moe.ffn_hidden_size=63 --perf.kernels=reference", "does not divide model.moe.ffn_hidden_size = 63"),
    ],
)
def test_biases_of_experts_need_kernels_and_ranks_that_know_them(overrides: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty.toml").touch()
    biased = (
        "--model.moe.num_experts=8 --parallel.ep=4 --parallel.dispatcher=alltoall --train.global_batch_sequences=64"
    )
    words = [*biased.split(), "--run.device=cuda", "--model.moe.ffn_hidden_size=64", *overrides.split()]
    for has_bias in (True, False):
        recipe = load_recipe(tmp_path / "empty.toml", [*words, f"--model.moe.expert_mlp_bias={str(has_bias).lower()}"])
        problems = check_rules(recipe, 8)
        assert bool(problems) == (has_bias and bool(message)) and message in " ".join(problems or [message])
