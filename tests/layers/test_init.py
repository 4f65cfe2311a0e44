"""Initial weights: deviations, no two parts equal, no uninitialised memory."""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.init import init_weights
from titan_moe.models.transformer import Transformer

LAYERS, STD = 4, 0.05
MOE = MoEConfig(
    num_experts=4, top_k=2, ffn_hidden_size=40, shared_ffn_hidden_size=48, latent_size=32, shared_expert_gate=True
)
GQA = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, qk_norm=True, qkv_bias=True)
MLA = AttentionConfig(
    kind="mla", num_heads=4, q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16
)
RESIDUAL_ENDS = (
    "attention.out.weight",
    "feed_forward.down.weight",
    "experts.mlp.down.weight",
    "latent_up.weight",
    "experts.down",
)


def built(
    seed: int = 0,
    attention: AttentionConfig = GQA,
    garbage: float = float("nan"),
    embedding_std: float | None = None,
    is_tied: bool = False,
) -> Transformer:
    config = ModelConfig(
        vocab_size=128,
        num_layers=LAYERS,
        num_dense_layers=1,
        hidden_size=64,
        ffn_hidden_size=96,
        embeddings_are_tied=is_tied,
        attention=attention,
        moe=MOE,
    )
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(garbage if tensor.is_floating_point() else 7)
    if is_tied:
        model.head.weight = model.embed.weight  # to_empty makes two of a shared parameter
    init_weights(model, seed, STD, LAYERS, embedding_std=embedding_std)
    return model


def tensors(model: Transformer) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def test_init_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = tensors(built())
    torch.manual_seed(2)
    second, other = tensors(built(garbage=123.0)), tensors(built(seed=1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    drawn = [name for name, tensor in built().named_parameters() if tensor.ndim > 1]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def test_init_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    built()
    assert torch.equal(torch.rand(4), expected)


def test_init_differs_between_layers_and_experts() -> None:
    model = built()
    layers = list(model.layers.values())
    parts = [layer.attention.qkv.weight for layer in layers]
    for experts in (layer.feed_forward.experts for layer in layers[1:]):
        parts += [*experts.gate_up.flatten(1, 2)]
    for a, b in combinations(parts, 2):
        count = min(a.numel(), b.numel())
        correlation = torch.corrcoef(torch.stack([a.flatten()[:count], b.flatten()[:count]]))[0, 1]
        assert correlation.abs() < 0.1  # 2,560 numbers and more: five deviations


@pytest.mark.parametrize("attention", [GQA, MLA], ids=["gqa", "mla"])
def test_init_deviation_of_every_parameter(attention: AttentionConfig) -> None:
    ends = set()
    for name, parameter in built(attention=attention).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            is_end = name.endswith(RESIDUAL_ENDS)
            spread = STD / math.sqrt(2 * LAYERS) if is_end else STD
            tolerance = 5 / math.sqrt(2 * parameter.numel())
            # the cut at three deviations takes a quarter of a percent
            assert parameter.std().item() == pytest.approx(0.9975 * spread, rel=tolerance), name
            assert abs(parameter.mean().item()) < 5 * spread / math.sqrt(parameter.numel()), name
            assert parameter.abs().max() < 3.0001 * spread, name
            ends |= {end for end in RESIDUAL_ENDS if name.endswith(end)}
    assert ends == set(RESIDUAL_ENDS), "each kind of end was there"


@pytest.mark.parametrize("is_tied", [False, True])
def test_init_deviation_of_embeddings(is_tied: bool) -> None:
    usual, wide = (dict(built(embedding_std=std, is_tied=is_tied).named_parameters()) for std in (None, 1.0))
    expected = 0.9975 * (STD if is_tied else 1.0)
    assert wide["embed.weight"].std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * 128 * 64))
    assert all(torch.equal(wide[name], usual[name]) for name in usual if name != "embed.weight" or is_tied)


def test_init_of_expert_biases_is_zero() -> None:
    plain, biased = (nn.ModuleDict({"experts": GroupedExperts(4, 16, 8, has_bias=is_so)}) for is_so in (False, True))
    for model in (plain, biased):
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, torch.nan)
        init_weights(model, seed=1, std=STD, num_layers=LAYERS)
    assert not biased.experts.gate_up_bias.any() and not biased.experts.down_bias.any()
    for name, parameter in plain.named_parameters():
        assert torch.equal(biased.get_parameter(name), parameter), "what is drawn beside it is what it was"


def test_init_resets_every_buffer() -> None:
    buffers = dict(built().named_buffers())
    assert {name.rpartition(".")[2] for name in buffers} == {
        "expert_bias_E",
        "tokens_per_expert_E",
        "batch_counts_E",
        "share_sums_E",
        "margins_EQ",
        "num_dropped",
        "aux_loss",
        "scale",
    }
    for name, buffer in buffers.items():
        assert (buffer == (1 if name.endswith("scale") else 0)).all(), name


def test_init_gives_the_loss_of_a_uniform_guess() -> None:
    tokens, labels = torch.randint(128, (2, 2, 32)).unbind()
    loss = built()(tokens, labels) / tokens.numel()
    assert loss.item() == pytest.approx(math.log(128), rel=0.05)
