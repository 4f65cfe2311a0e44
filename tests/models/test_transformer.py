"""Generation, greedy and sampled, and ownership of weights."""

import math
from dataclasses import replace

import pytest
import torch

from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.layers.block import Block
from titan_moe.layers.init import init_weights
from titan_moe.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=16,
    hidden_size=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
    moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16),
)


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(CONFIG)
    init_weights(model, seed=0, std=0.3, num_layers=CONFIG.num_layers)
    return model


def test_a_model_refuses_a_bad_config() -> None:
    with pytest.raises(ValueError, match='model.attention.kind = "mha" must be one of "gqa", "mla"'):
        Transformer(replace(CONFIG, attention=replace(CONFIG.attention, kind="mha")))
    with pytest.raises(ValueError, match="num_kv_heads = 3 does not divide"):
        Block(replace(CONFIG, attention=replace(CONFIG.attention, num_kv_heads=3)), is_dense=False)


@pytest.fixture
def prompt_BN() -> torch.Tensor:
    return torch.arange(10).view(2, 5)


def test_generate_without_temperature_takes_the_likeliest(model: Transformer, prompt_BN: torch.Tensor) -> None:
    tokens_BN = model.generate(prompt_BN, 6)
    assert tokens_BN.shape == (2, 11) and torch.equal(tokens_BN[:, :5], prompt_BN)
    likeliest_BN = model(tokens_BN).argmax(-1)
    assert torch.equal(tokens_BN[:, 5:], likeliest_BN[:, 4:-1])


def test_generate_is_repeatable_with_a_seed(model: Transformer, prompt_BN: torch.Tensor) -> None:
    def write(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return model.generate(prompt_BN, 12, temperature=1.0, generator=generator).tolist()

    assert write(1) == write(1) != write(2)


@pytest.mark.parametrize("is_tied", [False, True])
def test_transformer_on_meta_keeps_its_ties(is_tied: bool) -> None:
    with torch.device("meta"):
        model = Transformer(replace(CONFIG, embeddings_are_tied=is_tied))
    model.to_empty(device="cpu")
    assert (model.head.weight is model.embed.weight) == is_tied


@pytest.mark.parametrize("is_tied", [False, True])
def test_transformer_multiplies_embeddings(prompt_BN: torch.Tensor, is_tied: bool) -> None:
    configs = [replace(CONFIG, embeddings_are_tied=is_tied, embedding_multiplier=factor) for factor in (1.0, 4.0)]
    plain, scaled = map(Transformer, configs)
    init_weights(plain, seed=0, std=0.3, num_layers=CONFIG.num_layers)
    scaled.load_state_dict(plain.state_dict())
    assert torch.equal(scaled.embed(prompt_BN), 4 * plain.embed(prompt_BN))
    assert (scaled.head.weight is scaled.embed.weight) == is_tied
    assert not torch.allclose(scaled(prompt_BN), plain(prompt_BN))


MLA = AttentionConfig(kind="mla", num_heads=2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
SHARED = replace(CONFIG.moe, shared_ffn_hidden_size=8, shared_expert_gate=True, latent_size=8)


@pytest.mark.parametrize(
    "config",
    [
        replace(
            CONFIG,
            num_dense_layers=1,
            ffn_hidden_size=16,
            attention=replace(CONFIG.attention, qk_norm=True, qkv_bias=True),
        ),
        replace(CONFIG, attention=replace(MLA, q_lora_rank=8), moe=SHARED),
        replace(CONFIG, embeddings_are_tied=True),
    ],
    ids=["gqa", "mla", "tied"],
)
@pytest.mark.parametrize("has_labels", [False, True])
def test_transformer_weights_are_read_by_their_own_modules(config: ModelConfig, has_labels: bool) -> None:
    """So that a transform of the module applies to every use of the weight, and its hooks see all of them."""
    model, seen = Transformer(config), set()
    owners = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters(False))}
    for name, module in owners.items():
        module.register_forward_hook(lambda *_, name=name: seen.add(name))
    tokens_BN = torch.arange(10).view(2, 5)
    model(tokens_BN, tokens_BN if has_labels else None)
    assert len(owners) > 10 and seen == owners.keys()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_generate_samples_by_the_probabilities(model: Transformer, temperature: float) -> None:
    prompt_BN = torch.tensor([[1, 2, 3]])
    generator = torch.Generator().manual_seed(0)
    drawn_B = model.generate(prompt_BN.expand(4000, -1), 1, temperature=temperature, generator=generator)[:, -1]
    expected_V = (model(prompt_BN)[0, -1] / temperature).softmax(-1)
    torch.testing.assert_close(drawn_B.bincount(minlength=16) / 4000, expected_V, atol=0.03, rtol=0)


@pytest.mark.parametrize("normed", ["none", "all", "rope"])
def test_every_nth_layer_has_no_rotary_embedding(normed: str, prompt_BN: torch.Tensor) -> None:
    """Its attention is that of its projections, normed or not; the others' are rotated."""
    attention = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, nope_every=2, attn_scale=0.3, floor_scale=2)
    if normed != "none":
        options = {"qk_norm_is_after_rope": True, "qk_norm_has_weights": False, "qk_norm_layers": normed}
        attention = replace(attention, qk_norm=True, **options)
    model = Transformer(ModelConfig(vocab_size=16, num_layers=4, hidden_size=8, ffn_hidden_size=8, attention=attention))
    init_weights(model, seed=0, std=0.5, num_layers=4)
    contexts, x_BND = model.contexts(prompt_BN, None), torch.randn(*prompt_BN.shape, 8)
    for name, block in model.layers.items():
        projected = block.attention.qkv(x_BND).unflatten(-1, (-1, 8)).split([2, 1, 1], dim=2)
        q, k, v = (part.transpose(1, 2) for part in projected)
        if normed == "all":
            q, k = (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q = q * torch.tensor([1 + 0.3 * math.log(1 + (place + 1) // 2) for place in range(5)])[:, None]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        expected = block.attention.out(out.transpose(1, 2).flatten(2))
        assert torch.allclose(block.attention(x_BND, contexts[name]), expected, atol=1e-6) == (name in "13"), name


def test_texts_go_on_alike_with_kept_keys_in_layers_without_rotary_embedding() -> None:
    attention = replace(CONFIG.attention, nope_every=2, attn_scale=0.5, floor_scale=2, attention_chunk_size=3)
    model = Transformer(replace(CONFIG, attention=attention))
    init_weights(model, seed=0, std=0.5, num_layers=CONFIG.num_layers)
    prompts, lengths = torch.arange(10).view(2, 5), torch.tensor([2, 5])
    with_cache, without = (model.generate(prompts, 6, lengths_B=lengths, use_cache=kept) for kept in (True, False))
    for row, other, length in zip(with_cache, without, lengths, strict=True):
        assert torch.equal(row[: length + 6], other[: length + 6])
