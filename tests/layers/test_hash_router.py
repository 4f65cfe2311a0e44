"""Layers that route by the ids of tokens: the router of DeepSeek-V4 in transformers, and a plain model in fp64."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.config.balance import AuxLosses
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.mtp import MTPConfig
from titan_moe.layers.hash_router import HashRouter, balanced_table, fill_tables, loaded_otherwise
from titan_moe.layers.init import init_weights
from titan_moe.layers.moe import MoE
from titan_moe.models.part import part_of
from titan_moe.models.transformer import Transformer

WORDS, TOKENS, EXPERTS, TOP_K = 31, 11, 5, 3
MOE = MoEConfig(
    num_experts=EXPERTS,
    top_k=TOP_K,
    ffn_hidden_size=14,
    shared_ffn_hidden_size=10,
    score_fn="sqrtsoftplus",
    route_scale=1.5,
    hash_layers=(0, 2),
)
CONFIG = ModelConfig(
    vocab_size=WORDS,
    num_layers=3,
    hidden_size=54,
    attention=AttentionConfig(num_heads=9, num_kv_heads=3, head_dim=6),
    moe=MOE,
    init_std=0.2,
)
ROUTERS = "layers.0.feed_forward.router", "layers.2.feed_forward.router"


@pytest.fixture(autouse=True)
def fp64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def model_of(seed: int = 0, **changes: Any) -> Transformer:
    model = Transformer(replace(CONFIG, **changes), kernels=Kernels(experts="reference"), loss_chunk_tokens=5)
    init_weights(model, seed, std=0.2, num_layers=3)
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    tokens_BM = torch.randint(WORDS, (2, TOKENS + 1), generator=torch.Generator().manual_seed(3))
    ids_BN = torch.tensor([[0] * 4 + [1] * 7, [0] * 2 + [1] * 9])
    return tokens_BM[:, :-1], tokens_BM[:, 1:], ids_BN


def test_the_router_is_that_of_deepseek_v4() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(
        vocab_size=WORDS,
        hidden_size=54,
        num_hidden_layers=1,
        n_routed_experts=EXPERTS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        scoring_func="sqrtsoftplus",
        routed_scaling_factor=1.5,
    )
    theirs, ours = modeling.DeepseekV4HashRouter(config), HashRouter(CONFIG)
    init_weights(ours, 1, std=0.5, num_layers=1)
    theirs.load_state_dict({"weight": ours.weight.detach(), "tid2eid": ours.token_experts_VK.long()})
    x_BND, (tokens_BN, *_) = torch.randn(2, TOKENS, 54), batch()
    scores_TK, ids_TK = ours(x_BND, None, tokens_BN)
    _, weights_TK, indices_TK = theirs(x_BND, tokens_BN)
    assert torch.equal(ids_TK, indices_TK)
    torch.testing.assert_close(scores_TK, weights_TK, rtol=0, atol=1e-12)
    factors_TK = torch.randn_like(scores_TK)
    (scores_TK * factors_TK).sum().backward()
    (weights_TK * factors_TK).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=0, atol=1e-12)


def plain_moe(p: dict[str, Tensor], x_ND: Tensor, ids_NK: Tensor) -> Tensor:
    """Token by token."""
    scores_NE = F.softplus(x_ND @ p["router.weight"].T).sqrt()
    rows = []
    for x_D, ids_K, scores_E in zip(x_ND, ids_NK.tolist(), scores_NE, strict=True):
        gate, up = p["shared_experts.gate_up.weight"].chunk(2)
        y_D = p["shared_experts.down.weight"] @ (F.silu(gate @ x_D) * (up @ x_D))
        for expert in ids_K:
            gate, up = p["experts.gate_up"][expert]
            hidden = F.silu(gate @ x_D) * (up @ x_D)
            y_D = y_D + p["experts.down"][expert] @ hidden * 1.5 * scores_E[expert] / scores_E[ids_K].sum()
        rows.append(y_D)
    return torch.stack(rows)


def test_a_model_is_a_plain_one_in_logits_and_gradients() -> None:
    """Packed documents, and a layer between whose router chooses. Attention and norms are ours: other tests are of
    them."""
    model, (tokens_BN, labels_BN, ids_BN) = model_of(), batch()
    contexts, h = model.contexts(tokens_BN, ids_BN), model.embed(tokens_BN)
    for layer, block in model.layers.items():
        h, normed = block.front(h, contexts[layer])
        router, p = block.feed_forward.router, dict(block.feed_forward.named_parameters())
        is_hashed = layer in ("0", "2")
        assert isinstance(router, HashRouter) is is_hashed
        logits = normed @ router.weight.T
        ids_BNK = router.token_experts_VK[tokens_BN] if is_hashed else logits.topk(TOP_K).indices
        h = h + torch.stack([plain_moe(p, *of_row) for of_row in zip(normed, ids_BNK, strict=True)])
    logits = model.norm(h) @ model.head.weight.T
    loss = F.cross_entropy(logits.flatten(0, 1), labels_BN.flatten(), reduction="sum")
    expected = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(model(tokens_BN, None, ids_BN), logits, rtol=0, atol=1e-9)
    actual = model(tokens_BN, labels_BN, ids_BN)
    actual.backward()
    torch.testing.assert_close(actual, loss, rtol=0, atol=1e-9)
    for (name, parameter), grad in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("words", "top_k", "experts"), [(31, 3, 5), (1000, 6, 64), (7, 5, 5), (40, 1, 8)])
def test_a_table_has_different_experts_and_even_loads(words: int, top_k: int, experts: int) -> None:
    table_VK = balanced_table(words, top_k, experts, "0/x")
    assert table_VK.shape == (words, top_k) and table_VK.dtype == torch.int32
    assert all(len({*row}) == top_k for row in table_VK.tolist())
    counts = torch.bincount(table_VK.flatten(), minlength=experts)
    assert counts.max() - counts.min() <= top_k
    assert torch.equal(table_VK, balanced_table(words, top_k, experts, "0/x"))
    assert top_k == experts or not torch.equal(table_VK, balanced_table(words, top_k, experts, "0/y"))


def test_tables_are_of_the_seed_and_the_layer_and_saved() -> None:
    one, other, again = model_of(), model_of(1), model_of()
    tables = {name: one.get_buffer(f"{name}.token_experts_VK") for name in ROUTERS}
    assert tables.keys() == {key.removesuffix(".token_experts_VK") for key in one.state_dict() if "_VK" in key}
    assert not torch.equal(*tables.values())
    assert all(torch.equal(table, again.get_buffer(f"{name}.token_experts_VK")) for name, table in tables.items())
    assert all(not torch.equal(table, other.get_buffer(f"{name}.token_experts_VK")) for name, table in tables.items())
    with torch.device("meta"):
        loaded = Transformer(CONFIG, kernels=Kernels(experts="reference"))
    loaded.load_state_dict(one.state_dict(), assign=True)
    tokens_BN, labels_BN, _ = batch()
    torch.testing.assert_close(loaded(tokens_BN, labels_BN), one(tokens_BN, labels_BN))
    wrong = one.state_dict() | {f"{ROUTERS[0]}.token_experts_VK": torch.full((WORDS, TOP_K), 2)}
    with pytest.raises(ValueError, match=r"needs 3 different experts below 5 for each token id, and has \[2, 2, 2\]"):
        other.load_state_dict(wrong)


def test_tables_come_from_a_file(tmp_path: Path) -> None:
    model, tables_LVK = model_of(), np.stack([balanced_table(WORDS, TOP_K, EXPERTS, key).numpy() for key in "ab"])
    np.save(tmp_path / "all.npy", tables_LVK)
    np.save(tmp_path / "one.npy", tables_LVK[0].astype(np.uint16))
    for file, expected in (("all.npy", tables_LVK), ("one.npy", tables_LVK[[0, 0]])):
        fill_tables([model], MOE.hash_layers, str(tmp_path / file))
        tables = [model.get_buffer(f"{name}.token_experts_VK").numpy() for name in ROUTERS]
        assert np.array_equal(np.stack(tables), expected)
        assert loaded_otherwise([model], MOE.hash_layers, str(tmp_path / file)) == ""
    message = loaded_otherwise([model], MOE.hash_layers, str(tmp_path / "all.npy"))
    assert "has another table for layers.2.feed_forward.router than the checkpoint" in message
    np.savez(tmp_path / "all.npz", tables_LVK)
    np.save(tmp_path / "short.npy", tables_LVK[:, 1:])
    with pytest.raises(ValueError, match=r"has \[2, 30, 3\]; it must be \[31, 3\] or \[2, 31, 3\]"):
        fill_tables([model], MOE.hash_layers, str(tmp_path / "short.npy"))
    for file in ("none.npy", "all.npz"):
        with pytest.raises(ValueError, match=rf'hash_table = .*{file}\' cannot be read.* or set it to ""'):
            fill_tables([model], MOE.hash_layers, str(tmp_path / file))


def test_nothing_balances_these_layers() -> None:
    moe = replace(
        MOE,
        score_fn="sigmoid",
        aux_loss_coef=0.1,
        z_loss_coef=0.1,
        aux_losses=AuxLosses(global_batch=0.1),
        bias_update="quantile",
    )
    balanced, plain = model_of(moe=moe), model_of(moe=replace(MOE, score_fn="sigmoid"))
    for model in (balanced, plain):
        (model.layers["0"](x := torch.ones(1, 4, 54, requires_grad=True), _context(model, x))).sum().backward()
    for ours, theirs in zip(balanced.layers["0"].parameters(), plain.layers["0"].parameters(), strict=True):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)
    router = balanced.layers["0"].feed_forward.router
    assert router.balance.aux_loss == 0 and router.balance.tokens_per_expert_E.sum() == 4 * TOP_K
    assert not router.balance.counts_margins and balanced.layers["1"].feed_forward.router.balance.counts_margins


def _context(model: Transformer, x_BND: Tensor) -> Any:
    tokens_BN = torch.arange(4)[None]
    return model.with_tokens(model.contexts(x_BND, None), tokens_BN)["0"]


def test_texts_go_on_with_kept_keys_as_without() -> None:
    model, prompts_BN = model_of(), torch.tensor([[5, 7, 11, 0], [20, 21, 22, 23]])
    options: Any = {"lengths_B": torch.tensor([3, 4])}
    texts_BN = model.generate(prompts_BN, 9, **options, use_cache=False)
    assert model.has_cache and torch.equal(model.generate(prompts_BN, 9, **options), texts_BN)
    assert len({*texts_BN[0].tolist()}) > 3


def test_parts_without_the_embedding_read_tokens() -> None:
    with torch.device("meta"):
        whole = Transformer(replace(CONFIG, mtp=MTPConfig(1, 0.3)), kernels=Kernels(experts="reference"))
    model, (tokens_BN, labels_BN, _) = model_of(mtp=MTPConfig(1, 0.3)), batch()
    first, last = (
        part_of(whole, kept) for kept in (["embed", "layers.0"], ["layers.1", "layers.2", "layers.3", "norm", "head"])
    )
    for part in (first, last):
        part.to_empty(device="cpu")
        part.load_state_dict({name: value for name, value in model.state_dict().items() if name in part.state_dict()})
    h_BND = first(tokens_BN)
    expected = model(tokens_BN, labels_BN)
    torch.testing.assert_close(last(h_BND, labels_BN, None, read_BN=tokens_BN), expected)
    with pytest.raises(ValueError, match=r"ids \[2, 11\], int32 or int64, and got torch.float64 \[2, 11, 54\]"):
        last(h_BND, labels_BN)
    with pytest.raises(ValueError, match="and got none; pass them as tokens_BN"):
        MoE(CONFIG, kernels=Kernels(experts="reference"), routes_by_token=True)(torch.randn(1, 4, 54))
    with pytest.raises(ValueError, match=r"int32 or int64, and got torch.bool \[2, 11\]"):
        last(h_BND, labels_BN, None, read_BN=tokens_BN > 0)
