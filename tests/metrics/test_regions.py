"""Regions do not change a model's results, graphs and state dict; its traces contain every part."""

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

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=32,
    num_layers=12,
    num_dense_layers=10,  # more than Dynamo's limit of graphs per function
    hidden_size=16,
    ffn_hidden_size=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
    moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16, shared_ffn_hidden_size=8, latent_size=8),
)
INSIDE_A_BLOCK = {"attention", "dense", "router", "latent", "dispatch", "experts", "combine", "shared"}


def build(compiled: str, *, has_regions: bool) -> Transformer:
    model = Transformer(CONFIG)
    regional.apply(model, CompileConfig(compiled), CPU)
    if has_regions:
        regions.apply(model)
    init_weights(model, seed=0, std=0.2, num_layers=CONFIG.num_layers)
    return model


def trace(model: Transformer) -> tuple[torch.Tensor, set[str]]:
    tokens, labels = torch.randint(32, (2, 2, 12), generator=torch.Generator().manual_seed(1)).unbind()
    with profile(activities=[ProfilerActivity.CPU]) as run:
        loss = model(tokens, labels)
        loss.backward()
    return loss, {e.name.removeprefix(PREFIX) for e in run.events() if e.name.startswith(PREFIX)}


def test_regions_name_every_part_and_change_nothing_else() -> None:
    plain, wrapped = build("off", has_regions=False), build("off", has_regions=True)
    assert wrapped.state_dict().keys() == plain.state_dict().keys()
    (loss, plain_names), (wrapped_loss, names) = trace(plain), trace(wrapped)
    assert wrapped_loss == loss and plain_names == set()
    assert names == INSIDE_A_BLOCK | {"embedding", "block", "head"}
    for parameter, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_regions_keep_compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, names = [], set()
    for has_regions in (False, True):
        with monkeypatch.context() as patch:
            torch._dynamo.reset()
            counter = CompileCounterWithBackend("eager")  # the graphs as Dynamo makes them
            patch.setattr(torch, "compile", partial(torch.compile, backend=counter))
            _, names = trace(build("on", has_regions=has_regions))
            counts.append((counter.frame_count, counter.op_count))
    assert counts[0] == counts[1]
    # a compiled dense block is one graph
    assert names == (INSIDE_A_BLOCK - {"dense"}) | {"embedding", "block", "head"}
