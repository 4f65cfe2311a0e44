"""Blocks compiled in pieces: few graphs, equal gradients, unchanged parameter names."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from titan_moe.adapters import low_rank
from titan_moe.compile import regional
from titan_moe.config.adapter import AdapterConfig
from titan_moe.config.dispatchers import LOCAL
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.perf import CompileConfig
from titan_moe.config.recompute import of_entries
from titan_moe.dispatch import LocalDispatcher
from titan_moe.dispatch.base import Routed, route
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.local import LocalExchange
from titan_moe.kernels.experts.arena import Arena
from titan_moe.layers.init import init_weights
from titan_moe.layers.moe import MoE
from titan_moe.memory import recompute
from titan_moe.models.transformer import Transformer
from titan_moe.plan.cost.loads import LayerLoads
from titan_moe.profile.compile_trace import compile_report, start_records

pytestmark = pytest.mark.slow

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
SHALLOW = replace(CONFIG, num_layers=4)
MOES = {
    "softmax": MOE,
    "sigmoid, groups, gated": replace(
        MOE,
        score_fn="sigmoid",
        normalize_topk=True,
        num_groups=2,
        top_k_groups=1,
        shared_expert_gate=True,
        z_loss_coef=1e-3,
    ),
    "latent, scores on the input": replace(MOE, shared_ffn_hidden_size=0, latent_size=8, score_on="input"),
}


def build(compiled: str, *, config: ModelConfig = CONFIG, recomputed: str = "none") -> Transformer:
    model = Transformer(config)
    regional.apply(model, CompileConfig(compiled), CPU)
    recompute.apply(model, of_entries((recomputed,), len(model.layers)))
    init_weights(model, seed=0, std=0.2, num_layers=config.num_layers)
    return model


def moe_layers(model: Transformer) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


@pytest.fixture(autouse=True)
def same_batches() -> None:
    torch.manual_seed(1)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    return count_graphs(monkeypatch, "aot_eager")


@pytest.fixture
def dynamo_counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Where only the number of graphs matters, and all sizes are fixed: the graphs run as Dynamo makes them."""
    return count_graphs(monkeypatch, "eager")


def count_graphs(monkeypatch: pytest.MonkeyPatch, backend: str) -> CompileCounterWithBackend:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    return counter


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = torch.randint(32, (2, 2, 12)).unbind()
    return tokens, labels


def test_compile_num_graphs_is_independent_of_layers_and_batches(dynamo_counter: CompileCounterWithBackend) -> None:
    """Dense block and softmax, and of a MoE block front, router, experts and shared experts."""
    build("on", config=SHALLOW)(*batch()).backward()
    assert dynamo_counter.frame_count == 6
    deep = build("on")  # more layers than the graphs that Dynamo allows a function
    for _ in range(2):  # routing changes from batch to batch
        deep(*batch()).backward()
    assert dynamo_counter.frame_count == 6


def test_compile_windowed_and_full_layers_are_two_graphs(dynamo_counter: CompileCounterWithBackend) -> None:
    build("on", config=replace(CONFIG, num_layers=3))(*batch()).backward()
    num_graphs, dynamo_counter.frame_count = dynamo_counter.frame_count, 0
    torch._dynamo.reset()
    windowed = replace(CONFIG.attention, sliding_window=5, full_attention_every=3)
    deep = build("on", config=replace(CONFIG, attention=windowed))
    for _ in range(2):
        deep(*batch()).backward()
    assert dynamo_counter.frame_count == num_graphs + 1, (
        "both dense blocks have a window; the fronts have one graph with a window and one without"
    )


def test_one_product_between_borders_is_no_graph() -> None:
    """Nor is one with an adapter in its GEMM."""
    for adapter in (AdapterConfig(), AdapterConfig(rank=4, targets=("attention",))):
        model = Transformer(replace(SHALLOW, num_layers=1, num_dense_layers=1, adapter=adapter))
        low_rank.apply(model, adapter)
        attention = model.layers["0"].attention
        regional.apply(model, CompileConfig("on"), CPU, {(attention.qk_norm_rope, "forward")})
        graphs = [name for name, module in model.layers["0"].named_modules() if "forward" in vars(module)]
        assert graphs == ["attention_norm", "attention.qk_norm_rope", "ffn_norm", "feed_forward"]


@pytest.mark.few("sigmoid, groups, gated")
@pytest.mark.usefixtures("counter")
@pytest.mark.parametrize("moe", MOES.values(), ids=MOES)
def test_compile_equals_eager(moe: MoEConfig) -> None:
    config = replace(SHALLOW, moe=moe)
    assert_same(build("on", config=config), build("off", config=config), 1e-4)


@pytest.mark.few("block")
@pytest.mark.usefixtures("counter")
@pytest.mark.parametrize("recomputed", ["experts", "block"])
def test_compile_with_recompute_equals_eager(recomputed: str) -> None:
    assert_same(build("on", config=SHALLOW, recomputed=recomputed), build("off", config=SHALLOW), 1e-4)


@pytest.mark.few()
@pytest.mark.parametrize("has_backward", [False, True], ids=["forward", "forward_and_backward"])
def test_compile_inductor_block_in_bf16_equals_eager(has_backward: bool) -> None:
    """A whole block, as users may compile it. The only test in this file that generates code: one block, one size. A
    kernel takes a C++ compiler a second. tests/gpu/test_compile.py generates code for GPUs."""
    torch._dynamo.reset()
    config = replace(CONFIG, num_layers=1, num_dense_layers=0)
    compiled, plain = (build("off", config=config).bfloat16() for _ in range(2))
    block = compiled.layers["0"]
    block.forward = torch.compile(block.forward, fullgraph=True)
    if has_backward:
        assert_same(compiled, plain, 5e-2)
        return
    with torch.no_grad():
        tokens, _ = batch()
        logits = plain(tokens)
        assert logits.abs().mean() > 0.5
        torch.testing.assert_close(compiled(tokens), logits, rtol=5e-2, atol=5e-2)


def assert_same(compiled: Transformer, plain: Transformer, tolerance: float) -> None:
    """Compare loss, gradients and buffers of one batch, and the names of the state dict."""
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    tokens, labels = batch()
    losses = [model(tokens, labels) for model in (plain, compiled)]
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=tolerance)
    for loss in losses:
        loss.backward()
    for (name, parameter), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        error = (other.grad - parameter.grad).norm() / parameter.grad.norm()
        assert error < tolerance, f"{name} differs by {error:.1e}"
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(compiled.get_buffer(name), buffer, rtol=tolerance, atol=tolerance)


def test_compile_pieces_never_recompile_when_the_routing_changes() -> None:
    torch._dynamo.reset()
    start_records()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        model = build("on", config=SHALLOW)
    loads = set()
    for favourite in range(MOE.num_experts):
        for layer in moe_layers(model):
            layer.router.balance.reset_buffers()
            layer.router.expert_bias_E.zero_()[: favourite + 1] = 10 * favourite
        model(*batch()).backward()
        loads |= {tuple(layer.router.balance.tokens_per_expert_E.tolist()) for layer in moe_layers(model)}
    assert len(loads) > MOE.num_experts and any(0 in load for load in loads)
    report = compile_report()
    assert (report.graph_breaks, report.num_recompiles, len(report.functions)) == ({}, 0, 6)


@torch._dynamo.config.patch(recompile_limit=4)
def test_compile_validation_and_generation_need_few_graphs(dynamo_counter: CompileCounterWithBackend) -> None:
    """Dynamo raises an error at the ninth graph of a function. These runs need four of each."""
    counter = dynamo_counter
    model = build("on", config=SHALLOW)
    for num_documents in range(2):
        tokens, labels = batch()
        model(tokens, labels).backward()
        with torch.no_grad():
            model.eval()
            model(tokens, labels)
            model.generate(tokens[:1], 3)
            model.generate(tokens[:1, :5], 2)
            model.train()
        if num_documents == 0:
            num_graphs = counter.frame_count
    assert counter.frame_count == num_graphs


class HostReading(LocalDispatcher):
    """A dispatcher that synchronises with the device."""

    facts = replace(LOCAL, reads_host=True)

    def prepare(self, topk_ids_TK: torch.Tensor, topk_scores_TK: torch.Tensor) -> LocalExchange:
        assert int(topk_ids_TK.max()) < self.num_experts
        return super().prepare(topk_ids_TK, topk_scores_TK)


def test_compile_experts_in_a_users_block(dynamo_counter: CompileCounterWithBackend) -> None:
    """Router, experts and shared experts, and the softmax of the loss."""

    class OwnBlock(torch.nn.Module):
        def __init__(self, config: ModelConfig, *, is_dense: bool, kernels: Kernels) -> None:
            super().__init__()
            self.moe = MoE(config, kernels=kernels)

        def forward(self, x_BND: torch.Tensor, context: object) -> torch.Tensor:
            return x_BND + self.moe(x_BND)

    model = type("Model", (Transformer,), {"block_class": OwnBlock})(CONFIG)
    regional.apply(model, CompileConfig("on"), CPU)
    init_weights(model, seed=0, std=0.2, num_layers=CONFIG.num_layers)
    model(*batch()).backward()
    assert dynamo_counter.frame_count == 4


def make_routed(num_rows: int, num_double: int) -> Routed:
    """Rows as received from another rank: the first `num_double` have two local experts, the others one."""
    ids_SK = torch.randint(MOE.num_experts, (num_rows, 2))
    ids_SK[num_double:, 1] = -1
    x_SD = torch.randn(num_rows, CONFIG.hidden_size, requires_grad=True)
    num_slots = int((ids_SK >= 0).sum())
    return route(x_SD, ids_SK, torch.rand(num_rows, 2), MOE.num_experts, num_slots, None)


def test_compile_experts_of_any_number_of_rows_need_few_graphs(counter: CompileCounterWithBackend) -> None:
    moe = moe_layers(build("on", config=SHALLOW))[0]
    for num_rows, num_double in ((9, 3), (0, 0), (1, 0), (7, 7), (1, 1), (2, 0), (30, 4), (0, 0), (5, 5)):
        routed = make_routed(num_rows, num_double)
        y_SD = moe.experts(routed)
        assert y_SD.shape == routed.x_SD.shape
        y_SD.sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(moe.experts(routed), y_SD)
    assert counter.frame_count <= 4, "a static and a dynamic graph, with gradients and without"


def test_compile_experts_behind_a_host_reading_dispatcher_take_one_graph(counter: CompileCounterWithBackend) -> None:
    model = Transformer(SHALLOW)
    moe = moe_layers(model)[0]
    moe.dispatcher = HostReading(MOE.num_experts)
    regional.apply(model, CompileConfig("on"), CPU)
    init_weights(model, seed=0, std=0.2, num_layers=SHALLOW.num_layers)
    for num_rows, num_double in ((9, 3), (7, 2), (9, 4), (30, 4)):
        routed = make_routed(num_rows, num_double)
        moe.experts(routed).sum().backward()
    assert counter.frame_count == 1, "no graph for a fixed number of rows"


def test_compile_unbounded_experts_keep_the_bounded_graph_static(counter: CompileCounterWithBackend) -> None:
    moe = moe_layers(build("on", config=SHALLOW))[0]
    moe.dispatcher.capacity = ExpertCapacity(1.5)
    bounded, unbounded = make_routed(9, 3), make_routed(9, 9)
    assert bounded.rows_R.shape != unbounded.rows_R.shape
    for _ in range(3):
        moe.experts(bounded)
        with moe.dispatcher.capacity.unbounded():
            moe.experts(unbounded)
    assert counter.frame_count == 2, "one graph each"
    moe.experts(unbounded)
    assert counter.frame_count == 3, "the dynamic graph that separate code objects avoid"
    with moe.dispatcher.capacity.unbounded():
        moe.experts(make_routed(8, 5))
    assert counter.frame_count == 3, "numbers of unbounded calls are exact, so their first graph is for any"


def test_compile_experts_in_pieces_run_eagerly(dynamo_counter: CompileCounterWithBackend) -> None:
    moe, capacity = moe_layers(build("on", config=SHALLOW))[0], ExpertCapacity(1.5, layer_factor=1.0)
    capacity.use_arena(Arena(8, 4, torch.float32, "cpu"), LayerLoads(2, 100.0, 200, 256, 1600))
    moe.dispatcher.capacity, routed = capacity, make_routed(9, 3)
    with capacity.unbounded():
        expected = moe.experts(routed)
    assert dynamo_counter.frame_count == 0
    torch.testing.assert_close(moe.experts(routed), expected)
    assert dynamo_counter.frame_count == 1
