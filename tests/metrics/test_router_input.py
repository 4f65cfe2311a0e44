"""What routers read: shares of the common direction, and counts, as seen by hooks."""

import pytest
import torch

from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.layers.init import init_weights
from titan_moe.metrics.router_input import _reduce, observe_forward
from titan_moe.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=32,
    num_layers=3,
    num_dense_layers=1,
    hidden_size=16,
    ffn_hidden_size=8,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
    moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8),
)


def test_signal_of_a_common_direction() -> None:
    one = torch.tensor([3.0, 4.0]).expand(2, 5, 2)
    assert _reduce(one).tolist() == pytest.approx([12.5**0.5, 1.0, 1.0])
    opposite = one * torch.tensor([1.0, -1.0]).view(2, 1, 1)
    assert _reduce(opposite).tolist() == pytest.approx([12.5**0.5, 0.0, 1.0]), "common in each sequence alone"
    assert _reduce(one.bfloat16()).dtype == torch.float32


def test_observed_forward() -> None:
    model = Transformer(CONFIG)
    init_weights(model, seed=0, std=0.3, num_layers=3)
    tokens_BN, labels_BN = torch.randint(32, (2, 3, 9)).unbind()
    loss, layers = observe_forward(model, tokens_BN, labels_BN)
    assert loss == pytest.approx(model(tokens_BN, labels_BN).item(), rel=1e-6)
    assert [signals.layer for signals in layers] == ["0", "1", "2"]
    assert layers[0].residual == pytest.approx(_reduce(model.embed(tokens_BN)).tolist())
    assert layers[0].router is layers[0].tokens_per_expert_E is None
    _, ids_TK = model.layers["1"].feed_forward.router(model.layers["1"].front(*_input_of_layer_1(model, tokens_BN))[1])
    counts_E = torch.bincount(ids_TK.flatten(), minlength=4)
    assert layers[1].tokens_per_expert_E.tolist() == counts_E.tolist()
    assert layers[1].load == pytest.approx(counts_E.max().item() / 13.5)
    assert layers[1].num_idle == (counts_E == 0).sum()
    assert not model._forward_pre_hooks and not any(block._forward_pre_hooks for block in model.layers.values())


def _input_of_layer_1(model: Transformer, tokens_BN: torch.Tensor) -> tuple[object, object]:
    contexts = model.contexts(tokens_BN, None)
    return model.layers["0"](model.embed(tokens_BN), contexts["0"]), contexts["1"]
