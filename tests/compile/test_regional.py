"""The compiled pieces: few graphs, the same gradients, the same names."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from titan_moe.compile import regional
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.perf import CompileConfig
from titan_moe.dispatch.base import Routed, route
from titan_moe.layers.init import init_weights
from titan_moe.layers.moe import MoE
from titan_moe.models.transformer import Transformer

CPU = torch.device("cpu")
MOE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16, shared_ffn_hidden_size=8, aux_loss_coef=1e-2)
CONFIG = ModelConfig(
    vocab_size=32,
    num_layers=12,
    num_dense_layers=2,
    hidden_size=16,
    ffn_hidden_size=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, qk_norm=True),
    moe=MOE,
)


def built(
    compiled: str, num_layers: int = CONFIG.num_layers, attention: AttentionConfig = CONFIG.attention
) -> Transformer:
    model = Transformer(replace(CONFIG, num_layers=num_layers, attention=attention))
    regional.apply(model, CompileConfig(compiled), CPU)
    init_weights(model, seed=0, std=0.2, num_layers=num_layers)
    return model


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    return counter


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = torch.randint(32, (2, 2, 12)).unbind()
    return tokens, labels


def test_graphs_do_not_grow_with_layers_or_batches(counter: CompileCounterWithBackend) -> None:
    built("on", num_layers=3)(*batch()).backward()
    num_graphs = counter.frame_count
    assert num_graphs >= 5, "a dense block; front, router, experts and shared experts of the others"
    deep = built("on")
    for _ in range(2):  # routing changes from batch to batch
        deep(*batch()).backward()
    assert counter.frame_count == num_graphs


def test_windowed_and_full_layers_are_two_graphs(counter: CompileCounterWithBackend) -> None:
    built("on", num_layers=3)(*batch()).backward()
    num_graphs, counter.frame_count = counter.frame_count, 0
    torch._dynamo.reset()
    deep = built("on", attention=replace(CONFIG.attention, sliding_window=5, full_attention_every=3))
    for _ in range(2):
        deep(*batch()).backward()
    assert counter.frame_count == num_graphs + 1, "both dense blocks have a window; the fronts are of two kinds"


@pytest.mark.usefixtures("counter")
def test_pieces_compute_the_same() -> None:
    plain, compiled = built("off"), built("on")
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    tokens, labels = batch()
    losses = [model(tokens, labels) for model in (plain, compiled)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for (name, parameter), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        error = (other.grad - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, f"{name} differs by {error:.1e}"
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(compiled.get_buffer(name), buffer)


def test_experts_in_a_block_of_ones_own_are_compiled(counter: CompileCounterWithBackend) -> None:
    class OwnBlock(torch.nn.Module):
        def __init__(self, config: ModelConfig, *, is_dense: bool, kernels: Kernels) -> None:
            super().__init__()
            self.moe = MoE(config, kernels)

        def forward(self, x_BND: torch.Tensor, context: object) -> torch.Tensor:
            return x_BND + self.moe(x_BND)

    model = type("Model", (Transformer,), {"block_class": OwnBlock})(CONFIG)
    regional.apply(model, CompileConfig("on"), CPU)
    init_weights(model, seed=0, std=0.2, num_layers=CONFIG.num_layers)
    model(*batch()).backward()
    assert counter.frame_count == 4, "router, experts, shared experts, and the softmax of the loss"


@pytest.mark.parametrize(("choice", "device", "expected"), [("on", "cpu", True), ("off", "cuda", False)])
def test_the_recipe_decides(choice: str, device: str, expected: bool) -> None:
    assert regional.is_on(CompileConfig(choice), torch.device(device)) is expected


def test_by_default_only_cuda_compiles() -> None:
    assert [regional.is_on(CompileConfig("on_cuda"), torch.device(device)) for device in ("cpu", "cuda")] == [
        False,
        True,
    ]


def routed(num_rows: int, num_wanted: int) -> Routed:
    """Rows as another rank may send them: each wants one of its two choices here, the first ones both."""
    ids_SK = torch.randint(MOE.num_experts, (num_rows, 2))
    ids_SK[num_wanted:, 1] = -1
    x_SD = torch.randn(num_rows, CONFIG.hidden_size, requires_grad=True)
    num_slots = int((ids_SK >= 0).sum())
    return route(x_SD, ids_SK, torch.rand(num_rows, 2), MOE.num_experts, num_slots, None)


def test_experts_serve_any_number_of_rows_with_few_graphs(counter: CompileCounterWithBackend) -> None:
    (moe,) = (module for module in built("on", num_layers=3).modules() if isinstance(module, MoE))
    for num_rows, num_wanted in ((9, 3), (0, 0), (1, 0), (7, 7), (1, 1), (2, 0), (30, 4), (0, 0), (5, 5)):
        rows = routed(num_rows, num_wanted)
        served = moe.experts(rows)
        assert served.shape == rows.x_SD.shape
        served.sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(moe.experts(rows), served)
    assert counter.frame_count <= 4, "one size and any size, with gradients and without"
