"""Multi-token prediction computes the equations of its paper: losses and gradients of a plain reference in fp64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.mtp import MTPConfig
from titan_moe.layers.init import init_weights
from titan_moe.layers.mtp import MTPBlock, shifted
from titan_moe.models.transformer import Transformer

IGNORED, WORDS, TOKENS, WEIGHT = -100, 31, 11, 0.3
CONFIG = ModelConfig(
    vocab_size=WORDS,
    num_layers=2,
    num_dense_layers=1,
    hidden_size=54,
    ffn_hidden_size=38,
    attention=AttentionConfig(num_heads=9, num_kv_heads=3, head_dim=6, qk_norm=True),
    moe=MoEConfig(num_experts=5, top_k=3, ffn_hidden_size=14, shared_ffn_hidden_size=10),
    init_std=0.2,
)


def model_of(**changes: Any) -> Transformer:
    torch.set_default_dtype(torch.float64)
    try:
        model = Transformer(replace(CONFIG, **changes), kernels=Kernels(experts="reference"), loss_chunk_tokens=5)
    finally:
        torch.set_default_dtype(torch.float32)
    init_weights(model, seed=0, std=0.2, num_layers=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
    return model


def batch(*, has_documents: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    tokens_BM = torch.randint(WORDS, (2, TOKENS + 1), generator=generator)
    tokens_BN, labels_BN = tokens_BM[:, :-1], tokens_BM[:, 1:].clone()
    labels_BN[0, :3] = IGNORED
    if not has_documents:
        return tokens_BN, labels_BN, None
    ids_BN = torch.tensor([[0] * 4 + [1] * 7, [0] * 2 + [1] * 1 + [2] * 8])
    labels_BN[:, :-1][ids_BN[:, 1:] != ids_BN[:, :-1]] = IGNORED
    return tokens_BN, labels_BN, ids_BN


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + CONFIG.norm_eps).rsqrt() * weight


def reference(model: Transformer, tokens_BN: Tensor, labels_BN: Tensor, ids_BN: Tensor | None) -> list[Tensor]:
    """The loss of each depth, 0 first, token by token. Blocks are ours: other tests are of them."""
    p, contexts = dict(model.named_parameters()), model.contexts(tokens_BN, ids_BN)
    mtp, num_layers = model.config.mtp, model.config.num_layers
    h = F.embedding(tokens_BN, p["embed.weight"])
    for layer in range(num_layers):
        h = model.layers[str(layer)](h, contexts[str(layer)])
    h = norm(h, p["norm.weight"])
    losses = []
    for depth in range(mtp.num_depths + 1):
        total = h.new_zeros(())
        if depth:
            layer = num_layers if mtp.repeats_layer else num_layers + depth - 1
            joined = torch.zeros_like(h)
            for b in range(len(tokens_BN)):
                for i in range(TOKENS):
                    is_inside = i + depth < TOKENS and (ids_BN is None or ids_BN[b, i + depth] == ids_BN[b, i])
                    word = p["embed.weight"][tokens_BN[b, i + depth] if is_inside else 0]
                    both = (
                        norm(word, p[f"layers.{layer}.embedding_norm.weight"]),
                        norm(h[b, i], p[f"layers.{layer}.hidden_norm.weight"]),
                    )
                    joined[b, i] = p[f"layers.{layer}.eh_proj.weight"] @ torch.cat(both)
            block = model.layers[str(layer)]
            middle, normed = block.front(joined, contexts[str(layer)])
            h = norm(middle + block.feed_forward(normed), p[f"layers.{layer}.final_norm.weight"])
        for b in range(len(tokens_BN)):
            for i in range(TOKENS - depth):
                if ids_BN is not None and ids_BN[b, i + depth] != ids_BN[b, i]:
                    continue
                if (word := labels_BN[b, i + depth]) != IGNORED:
                    total = total - (h[b, i] @ model.head.weight.T).log_softmax(-1)[word]
        losses.append(total)
    return losses


@pytest.mark.few("two-documents")
@pytest.mark.parametrize("has_documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"mtp": MTPConfig(2, WEIGHT)}, id="two"),
        pytest.param({"mtp": MTPConfig(3, WEIGHT, repeats_layer=True), "embeddings_are_tied": True}, id="repeated"),
        pytest.param({"mtp": MTPConfig(1, WEIGHT), "moe": MoEConfig()}, id="dense"),
    ],
)
def test_mtp_is_the_plain_reference(changes: dict[str, Any], has_documents: bool) -> None:
    model, inputs = model_of(**changes), batch(has_documents=has_documents)
    mtp, scale = model.config.mtp, 0.25
    main, *ahead = reference(model, *inputs)
    expected = (main + mtp.loss_weight / mtp.num_depths * torch.stack(ahead).sum()) * scale
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for module in model.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()

    loss = model(*inputs)
    (loss * scale).backward()
    torch.testing.assert_close(loss, main, rtol=1e-12, atol=1e-12)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert gradients[name].abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-11, msg=name)
    sums = torch.cat([block.losses.sums_K2 for block in model.mtp_blocks.values()])
    torch.testing.assert_close(sums[:, 0], torch.stack(ahead).detach() * scale, rtol=1e-9, atol=1e-9)
    assert torch.equal(model(*inputs).detach(), loss.detach()), "a forward changes nothing"
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs), loss.detach(), rtol=1e-12, atol=1e-12)


def test_a_depth_sees_no_later_token_and_no_other_document() -> None:
    """What a depth predicts at a token does not depend on tokens behind those that it reads."""
    tokens_BN, labels_BN, ids_BN = batch(has_documents=True)
    assert ids_BN is not None
    for num_places in (1, 2, 9, 11, 12):
        ahead_BN, labels_ahead_BN = shifted(tokens_BN, labels_BN, ids_BN, num_places)
        for b, i in ((b, i) for b in range(2) for i in range(TOKENS)):
            is_inside = i + num_places < TOKENS and bool(ids_BN[b, i + num_places] == ids_BN[b, i])
            assert ahead_BN[b, i] == (tokens_BN[b, i + num_places] if is_inside else 0)
            assert labels_ahead_BN[b, i] == (labels_BN[b, i + num_places] if is_inside else IGNORED)


def test_routers_of_mtp_count_and_balance_like_others() -> None:
    mtp = MTPConfig(2, WEIGHT, repeats_layer=True)
    model, inputs = model_of(mtp=mtp, moe=replace(CONFIG.moe, aux_loss_coef=1e-2)), batch(has_documents=False)
    model(*inputs).backward()
    counts = {name: block.feed_forward.router.balance for name, block in model.layers.items() if name != "0"}
    tokens = 2 * TOKENS * CONFIG.moe.top_k
    assert {name: int(balance.tokens_per_expert_E.sum()) for name, balance in counts.items()} == {
        "1": tokens,
        "2": 2 * tokens,
    }
    assert all(balance.aux_loss > 0 for balance in counts.values())


def test_generate_leaves_mtp_out() -> None:
    model, tokens = model_of(mtp=MTPConfig(1)), torch.arange(6)[None]
    plain = model_of()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("layers.2.")})
    assert torch.equal(model.generate(tokens, 4), plain.generate(tokens, 4))
    assert [type(block) for block in model.layers.values()][2:] == [MTPBlock]
