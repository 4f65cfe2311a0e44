"""Texts go on as transformers continues them, with kept keys and values as with whole forwards."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.hf_twins import greedy, ours_for, transformers, twin
from torch import nn

from titan_moe.checkpoint.hf import load_hf
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.layers.attention import GroupedQueryAttention
from titan_moe.layers.init import init_weights
from titan_moe.models import generate
from titan_moe.models.generate import keep_likeliest
from titan_moe.models.transformer import Transformer

PROMPTS = [[5, 7, 11], [*range(20, 37)], [60]]
LENGTHS_B = torch.tensor([len(prompt) for prompt in PROMPTS])
NUM_TOKENS = 14


def padded(pad: int) -> torch.Tensor:
    return torch.tensor([prompt + [pad] * (17 - len(prompt)) for prompt in PROMPTS])


def own(texts_BN: torch.Tensor) -> list[list[int]]:
    return [row[: length + NUM_TOKENS] for row, length in zip(texts_BN.tolist(), LENGTHS_B, strict=True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = tmp_path_factory.mktemp("mixtral")
    twin("mixtral").save_pretrained(folder)
    model = ours_for(folder)
    load_hf(model, folder)
    return model


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe-tied", "deepseek_v3", "llama4_text", "exaone_moe", "afmoe"])
def test_texts_go_on_as_in_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across windows and chunks of 11; rows with prompts of other lengths are as if alone; pieces of prompts."""
    theirs = twin(name, **({"mup_enabled": False} if name == "afmoe" else {}))  # with it one token is repeated
    theirs.save_pretrained(tmp_path)
    model = ours_for(tmp_path)
    load_hf(model, tmp_path)
    expected = greedy(theirs, PROMPTS, NUM_TOKENS)
    assert len({*expected[0]}) > 4, "repeated tokens would make the comparison trivial"
    assert own(model.generate(padded(1), NUM_TOKENS, lengths_B=LENGTHS_B, use_cache=False)) == expected
    assert own(model.generate(padded(2), NUM_TOKENS, lengths_B=LENGTHS_B)) == expected
    monkeypatch.setattr(generate, "PROMPT_TOKENS", 3 * 5)
    assert own(model.generate(padded(3), NUM_TOKENS, lengths_B=LENGTHS_B)) == expected


def test_a_forward_has_new_tokens_alone(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    handle = model.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    model.generate(padded(0), 4, lengths_B=LENGTHS_B)
    handle.remove()
    assert seen == [3 * 17, 3, 3, 3]


@pytest.mark.parametrize("piece", [1, 15])
def test_latents_are_kept_in_place_of_keys_and_values(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 13 new tokens on, keys are projected from them, else queries are to their width; in fp64 all are equal."""
    attention = AttentionConfig(
        kind="mla", num_heads=3, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, q_lora_rank=0
    )
    attention = replace(attention, sliding_window=7, window_layers=(1,), attn_scale=0.5, floor_scale=2, nope_every=2)
    model = Transformer(ModelConfig(vocab_size=61, hidden_size=54, ffn_hidden_size=38, attention=attention)).double()
    init_weights(model, seed=0, std=0.5, num_layers=2)
    monkeypatch.setattr(generate, "PROMPT_TOKENS", 3 * piece)
    forwards = model.cached_forwards(18)
    with torch.no_grad():
        logits_BV = forwards(padded(0), LENGTHS_B)
        torch.testing.assert_close(logits_BV, model.next_logits(padded(0), LENGTHS_B), atol=1e-9, rtol=0)
    kept = [tuple(x.shape) for layer in forwards.cache.layers.values() for x in layer.kept]
    assert kept == [(3, 18, 10), (3, 18, 1, 4)] * 2
    made = [[tuple(x.shape) for x in layer.of_weights] for layer in forwards.cache.layers.values()]
    assert piece > 1 or made == [[(10, 3, 6), (10, 3, 5)]] * 2, "once, not in each forward"


@pytest.mark.parametrize("pads", [False, True])
def test_texts_drop_nothing(pads: bool) -> None:
    """So a row is the same alone, beside others, with padding and with kept keys; other forwards drop afterwards."""
    kernels = Kernels(experts="reference")
    moe = MoEConfig(5, 3, 7, capacity_factor=0.5, pad_to_capacity=pads)
    attention = AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=6)
    config = ModelConfig(vocab_size=61, num_layers=1, hidden_size=18, attention=attention, moe=moe)
    dropping = Transformer(config, kernels=kernels).double()
    init_weights(dropping, seed=0, std=0.5, num_layers=1)
    with torch.no_grad():
        logits_BNV = dropping(padded(0))
    expected = own(dropping.generate(padded(1), NUM_TOKENS, lengths_B=LENGTHS_B))
    assert own(dropping.generate(padded(2), NUM_TOKENS, lengths_B=LENGTHS_B, use_cache=False)) == expected
    for prompt, text in zip(PROMPTS, expected, strict=True):
        assert dropping.generate(torch.tensor([prompt]), NUM_TOKENS)[0].tolist() == text
    dropless = Transformer(replace(config, moe=MoEConfig(5, 3, 7)), kernels=kernels).double()
    dropless.load_state_dict(dropping.state_dict())
    assert own(dropless.generate(padded(0), NUM_TOKENS, lengths_B=LENGTHS_B)) == expected
    with torch.no_grad():
        assert torch.equal(dropping(padded(0)), logits_BNV) and not torch.equal(dropless(padded(0)), logits_BNV)


class Shifted(GroupedQueryAttention):
    """Attention of one's own, which knows nothing of a cache."""

    def core(self, q_BNHD, k_BNHD, v_BNHD, context):
        return self.out(torch.roll(v_BNHD, 1, 1).flatten(2))


def test_a_model_of_ones_own_has_whole_forwards(model: Transformer) -> None:
    assert model.has_cache
    block = next(iter(model.layers.values()))
    for owner, name, other in (
        (block, "attention", Shifted(model.config)),
        (model, "embed", nn.Sequential(model.embed)),
    ):
        own = getattr(owner, name)
        setattr(owner, name, other)
        assert not model.has_cache
        setattr(owner, name, own)
    assert model.has_cache


def test_a_row_that_has_ended_stays_ended(model: Transformer) -> None:
    whole = own(model.generate(padded(0), NUM_TOKENS, lengths_B=LENGTHS_B))
    ends = {whole[0][3 + 4], whole[1][17 + 2]}
    texts_BN = model.generate(padded(0), NUM_TOKENS, lengths_B=LENGTHS_B, end_tokens=ends, pad_token=44)
    for row, full, length in zip(texts_BN.tolist(), whole, LENGTHS_B.tolist(), strict=True):
        added = full[length:]
        stop = next((place + 1 for place, token in enumerate(added) if token in ends), len(added))
        assert row == full[: length + stop] + [44] * (len(row) - length - stop)
    one = model.generate(padded(0)[:1], NUM_TOKENS, lengths_B=LENGTHS_B[:1], end_tokens=ends)
    assert one.shape[1] < 3 + NUM_TOKENS and one[0, -1].item() in ends, "all rows have ended"


@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_the_likeliest_tokens_are_those_of_transformers(top_p: float) -> None:
    logits_BV = torch.randn(5, 61, generator=torch.Generator().manual_seed(0)) * 2
    warper = transformers.generation.logits_process.TopPLogitsWarper(top_p)
    assert torch.equal(keep_likeliest(logits_BV, top_p), warper(None, logits_BV))


def test_a_small_top_p_takes_the_likeliest(model: Transformer) -> None:
    sampled = model.generate(padded(0), 5, lengths_B=LENGTHS_B, temperature=1.0, top_p=1e-6)
    assert torch.equal(sampled, model.generate(padded(0), 5, lengths_B=LENGTHS_B))


def test_what_ranks_agree_on_is_taken(model: Transformer) -> None:
    texts_BN = model.generate(padded(0)[:, :2], 3, agree=lambda tokens_B: torch.full_like(tokens_B, 9))
    assert texts_BN[:, 2:].unique().tolist() == [9]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths_B": torch.tensor([0, 3, 3])}, "must be from 1 to 17"),
        ({"lengths_B": torch.tensor([18, 3, 3])}, "must be from 1 to 17"),
        ({"temperature": -1.0}, "temperature = -1.0 must be at least 0"),
        ({"top_p": 0.0}, "top_p = 0.0 above 0"),
    ],
)
def test_bad_options_are_refused(model: Transformer, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model.generate(padded(0), 1, **options)
