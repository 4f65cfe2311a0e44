"""Experts are recorded and replayed: the same bits again, or those of a model that takes the given experts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.recompute import of_entries
from titan_moe.layers.moe import MoE
from titan_moe.layers.replay import RoutingReplay
from titan_moe.memory import recompute
from titan_moe.models.transformer import Transformer

SEQUENCES, TOKENS, EXPERTS, TOP_K = 2, 11, 5, 3
EXPERT_LAYERS = MoEConfig(EXPERTS, TOP_K, 7, aux_loss_coef=0.3, z_loss_coef=0.1)
ATTENTION = AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=6)
MODEL = ModelConfig(
    vocab_size=31,
    num_layers=3,
    num_dense_layers=1,
    hidden_size=18,
    ffn_hidden_size=10,
    attention=ATTENTION,
    moe=EXPERT_LAYERS,
    init_std=0.3,
)
REFERENCE = Kernels(experts="reference")
BATCH = torch.randint(31, (2, SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0)).unbind()


def build() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(MODEL, kernels=REFERENCE)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def chosen(*shape: int) -> Tensor:
    return torch.rand(*shape, EXPERTS, generator=torch.Generator().manual_seed(1)).topk(TOP_K).indices


def loss_and_gradients(model: Transformer) -> list[Tensor]:
    model.zero_grad()
    loss = model(*BATCH)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("repeated", ["none", "block"])
def test_what_was_recorded_gives_the_same_bits_whatever_would_be_chosen(repeated: str) -> None:
    model = build()
    recompute.apply(model, of_entries((repeated,), MODEL.num_layers))
    plain, replay = loss_and_gradients(model), RoutingReplay(model, SEQUENCES, TOKENS)
    with replay:
        recorded = loss_and_gradients(model)
    ids = replay.topk_ids
    assert ids.shape == (SEQUENCES, TOKENS, 3, TOP_K) and (ids[:, :, 0] == -1).all() and (ids[:, :, 1:] >= 0).all()
    for router in replay.routers.values():
        router.expert_bias_E.normal_()  # selection alone changes
    assert not all(map(torch.equal, loss_and_gradients(model), plain))
    with replay:
        replayed = loss_and_gradients(model)
    for expected, *others in zip(plain, recorded, replayed, strict=True):
        assert all(torch.equal(expected, other) for other in others)
    assert torch.equal(replay.topk_ids, ids)
    replay.clear()
    with replay:
        loss_and_gradients(model)
    assert not torch.equal(replay.topk_ids, ids)


def test_given_experts_are_those_of_brute_force() -> None:
    torch.manual_seed(0)
    layer = MoE(ModelConfig(hidden_size=18, moe=EXPERT_LAYERS), kernels=REFERENCE).double()
    x_BND = torch.randn(SEQUENCES, TOKENS, 18, dtype=torch.float64, requires_grad=True)
    ids_BNK = chosen(SEQUENCES, TOKENS)
    ids_BNK[1, 4:] = -1  # the router chooses
    replay = RoutingReplay(layer, SEQUENCES, TOKENS)
    replay.set(ids_BNK[:, :, None])
    with replay:
        layer(x_BND).square().mean().backward()
    names, parameters = zip(*layer.named_parameters(), strict=True)
    actual = [x_BND.grad, *(parameter.grad for parameter in parameters)]

    logits_BNE = x_BND @ layer.router.weight.T
    scores_BNE = logits_BNE.softmax(-1)
    open_BN1 = (ids_BNK < 0).all(-1, keepdim=True)
    taken_BNK = torch.where(open_BN1, scores_BNE.topk(TOP_K).indices, ids_BNK)
    weights_BNE = torch.zeros_like(scores_BNE).scatter(-1, taken_BNK, scores_BNE.gather(-1, taken_BNK))
    weights_BNE = weights_BNE / weights_BNE.sum(-1, keepdim=True)
    gate_up, down = layer.experts.gate_up, layer.experts.down
    gate, up = (torch.einsum("bnd,efd->bnef", x_BND, gate_up[:, i]) for i in range(2))
    y_BNED = torch.einsum("bnef,edf->bned", nn.functional.silu(gate) * up, down)
    loss = (y_BNED * weights_BNE[..., None]).sum(2).square().mean()
    counts_BE = nn.functional.one_hot(scores_BNE.topk(TOP_K).indices, EXPERTS).sum((1, 2))  # by score
    shares_BE = (scores_BNE / scores_BNE.sum(-1, keepdim=True)).mean(1)
    loss = loss + 0.3 * (EXPERTS / (TOP_K * TOKENS) * counts_BE * shares_BE).sum(1).mean()
    loss = loss + 0.1 * logits_BNE.logsumexp(-1).square().mean()
    assert torch.equal(replay.topk_ids[:, :, 0].sort().values, taken_BNK.int().sort().values)
    expected = torch.autograd.grad(loss, [x_BND, *parameters])
    for name, one, other in zip(("x", *names), actual, expected, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.few
@pytest.mark.slow
def test_a_compiler_makes_one_graph_for_all_experts() -> None:
    model = build()
    replay, plain = RoutingReplay(model, SEQUENCES, TOKENS), loss_and_gradients(model)
    for block in model.layers.values():
        block.compile(fullgraph=True, backend="aot_eager")
    counters.clear()
    for ids in (None, chosen(SEQUENCES, TOKENS, 3), replay.topk_ids):
        replay.clear() if ids is None else replay.set(ids)
        with replay:
            seen = loss_and_gradients(model)
        assert all(map(torch.equal, seen, plain)) == (ids is None or bool((ids < 0).all()))
        assert counters["stats"]["unique_graphs"] == 2  # a dense block, and one with experts


def test_all_forms_of_ids_are_the_same(tmp_path: Path) -> None:
    ids = chosen(SEQUENCES, TOKENS, 3)
    np.save(tmp_path / "ids.npy", ids.numpy().astype(np.int16))
    engine = [ids[0].numpy().astype(np.uint8), ids[1, :-1].tolist()]  # as vLLM: none for the last token
    model = build()
    replay = RoutingReplay(model, SEQUENCES, TOKENS)
    for form in (ids, ids[:, :, 1:], tmp_path / "ids.npy", lambda layer: ids[:, :, layer], engine):
        replay.clear()
        replay.set(form)
        with replay:
            model(*BATCH)
        whole = slice(None) if form is not engine else slice(-1)
        assert torch.equal(replay.topk_ids[:, whole, 1:], ids[:, whole, 1:].int())
        assert (replay.topk_ids[:, :, 1:] >= 0).all()


REFUSED: dict[str, tuple[Any, str]] = {
    "another shape": (chosen(SEQUENCES, TOKENS - 1, 3), r"layer 1 takes experts \[2, 11, 3\], and got \[2, 10, 3\]"),
    "other layers": (chosen(SEQUENCES, TOKENS, 4), r"are \[2, 11, 3, 3\], and got \[2, 11, 4, 3\]"),
    "a longer sequence": ([chosen(TOKENS + 1, 3)] * 2, "a sequence has up to 11 tokens"),
    "no expert": (chosen(SEQUENCES, TOKENS, 3) + 1, r"layer 1: .* no different experts below 5, or -1 for all"),
    "one expert twice": (torch.zeros(SEQUENCES, TOKENS, 3, TOP_K, dtype=torch.int16), "layer 1: 22 tokens"),
    "fractions": (torch.rand(SEQUENCES, TOKENS, 3, TOP_K), "experts are integers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_router_could_choose_is_refused(name: str) -> None:
    ids, words = REFUSED[name]
    replay = RoutingReplay(build(), SEQUENCES, TOKENS)
    with pytest.raises(ValueError, match=words):
        replay.set(ids)
    assert (replay.topk_ids == -1).all(), "nothing was written"
    with replay, pytest.raises(ValueError, match=r"are replayed for \[2, 11\] sequences and tokens, and .* \[2, 5\]"):
        replay.routers[1](torch.zeros(2, 5, 18))
