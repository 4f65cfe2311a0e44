"""Runs in pieces: when a stage gathers the parameters of a layer, and when its backward reduces their gradients."""

import pytest
import torch
from torch import nn

from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.pipeline import runs
from titan_moe.parallel.pipeline.runs import RunInPieces, StageInPieces
from titan_moe.plan.pipeline.pieces import ROOT

CONFIG = ModelConfig(
    vocab_size=16,
    num_layers=3,
    num_dense_layers=1,
    hidden_size=8,
    ffn_hidden_size=8,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4),
    moe=MoEConfig(num_experts=2, top_k=1, ffn_hidden_size=8, normalize_topk=False),
)


class Recorder:
    """Stands for `ManualFSDP`: notes its calls."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[tuple[str, int]] = []
        self.handles: dict[int, None] = {}

    def gather(self, layer: int) -> None:
        self.calls.append(("gather", layer))
        self.handles[layer] = None

    def wait(self, layer: int) -> None:
        self.calls.append(("wait", layer))
        del self.handles[layer]

    def reduce_grads(self, layer: int, *, is_last: bool) -> None:
        self.calls.append(("reduce" if is_last else "accumulate", layer))


def test_runs_gather_a_layer_ahead_and_reduce_it_after_its_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "ManualFSDP", Recorder)
    stage = StageInPieces(Transformer(CONFIG))
    calls = stage.parameters.calls
    tokens_BN, scale = torch.zeros(1, 4, dtype=torch.int64), torch.tensor(1.0)
    layers = range(CONFIG.num_layers)
    for number, reduces in enumerate((False, True)):
        run = RunInPieces(stage, tokens_BN, None, scale, torch.enable_grad)
        forward = run.forward(tokens_BN)
        num_turns = sum(1 for _ in forward)
        gathered = [("gather", ROOT), ("wait", ROOT), ("gather", 0)]
        gathered += [call for layer in layers for call in (("wait", layer), ("gather", layer + 1))]
        assert calls == ([] if number else gathered[:-1]), "once a step, a layer ahead"
        calls.clear()
        assert sum(1 for _ in run.backward(torch.tensor(1.0), reduces=reduces)) == num_turns
        kind = "reduce" if reduces else "accumulate"
        assert calls == [(kind, layer) for layer in (*reversed(layers), ROOT)]
        calls.clear()
