"""Marked models compute, compile and are saved as before; their traces name every part."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

from titan_moe.compile import regional
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.perf import CompileConfig
from titan_moe.layers.init import init_weights
from titan_moe.metrics import regions
from titan_moe.models.transformer import Transformer
from titan_moe.profile.region import PREFIX

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=32,
    num_layers=12,
    num_dense_layers=10,  # more than Dynamo would compile one by one
    hidden_size=16,
    ffn_hidden_size=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
    moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16, shared_ffn_hidden_size=8, latent_size=8),
)
INSIDE_A_BLOCK = {"attention", "dense", "router", "latent", "dispatch", "experts", "combine", "shared"}


def built(compiled: str, *, is_marked: bool, extent: str = "pieces") -> Transformer:
    model = Transformer(CONFIG)
    regional.apply(model, CompileConfig(compiled, extent=extent), CPU)
    if is_marked:
        regions.apply(model)
    init_weights(model, seed=0, std=0.2, num_layers=CONFIG.num_layers)
    return model


def traced(model: Transformer) -> tuple[torch.Tensor, set[str]]:
    tokens, labels = torch.randint(32, (2, 2, 12), generator=torch.Generator().manual_seed(1)).unbind()
    with profile(activities=[ProfilerActivity.CPU]) as run:
        loss = model(tokens, labels)
        loss.backward()
    return loss, {e.name.removeprefix(PREFIX) for e in run.events() if e.name.startswith(PREFIX)}


def test_every_part_has_its_name_and_nothing_else_changes() -> None:
    plain, named = built("off", is_marked=False), built("off", is_marked=True)
    assert named.state_dict().keys() == plain.state_dict().keys()
    (loss, nothing), (same_loss, names) = traced(plain), traced(named)
    assert same_loss == loss and nothing == set()
    assert names == INSIDE_A_BLOCK | {"embedding", "block", "head"}
    for parameter, other in zip(plain.parameters(), named.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize(
    ("extent", "inside"),
    [("pieces", INSIDE_A_BLOCK - {"dense"}), ("block", set())],  # a compiled dense block is one piece
)
def test_compiled_pieces_are_the_same_graphs(monkeypatch: pytest.MonkeyPatch, extent: str, inside: set[str]) -> None:
    counts, names = [], set()
    for is_marked in (False, True):
        with monkeypatch.context() as patch:
            torch._dynamo.reset()
            counter = CompileCounterWithBackend("aot_eager")
            patch.setattr(torch, "compile", partial(torch.compile, backend=counter))
            _, names = traced(built("on", is_marked=is_marked, extent=extent))
            counts.append((counter.frame_count, counter.op_count))
    assert counts[0] == counts[1]
    assert names == inside | {"embedding", "block", "head"}
