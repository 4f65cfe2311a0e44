"""Outputs that backward makes again: the same bits, without the memory, whoever saves them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from titan_moe.compile import regional
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.perf import CompileConfig
from titan_moe.config.recompute import RECOMPUTABLE, of_entries
from titan_moe.kernels.experts.weights import EachWeight
from titan_moe.layers.init import init_weights
from titan_moe.layers.moe import MoE
from titan_moe.memory import recompute
from titan_moe.memory.repeated_outputs import RepeatedOutputs
from titan_moe.models.transformer import Transformer

NUM_LAYERS = 3
LATENTS = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
ATTENTIONS = {
    "gqa": AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True, output_gate="element"),
    "mla": AttentionConfig(kind="mla", num_heads=4, num_kv_heads=4, head_dim=8, **LATENTS),
}
OTHERS = {"gqa": "mla_up", "mla": "qkv_rope"}
"""The name that a kind of attention lacks."""
NAMES = {
    kind: [name for name in RECOMPUTABLE if name not in ("block", "moe_act", other)] for kind, other in OTHERS.items()
}


def config_of(kind: str) -> ModelConfig:
    """The first layer is dense; shared experts are gated beside gqa."""
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16, shared_ffn_hidden_size=16, aux_loss_coef=0.01)
    moe = replace(moe, shared_expert_gate=kind == "gqa")
    sizes = {"num_dense_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": 64}
    return ModelConfig(num_layers=NUM_LAYERS, attention=ATTENTIONS[kind], moe=moe, **sizes)


def build(kind: str, entries: Sequence[str] = (), *, compiled: str = "off") -> Transformer:
    """In fp64 unless it is compiled."""
    model = Transformer(config_of(kind), kernels=Kernels(experts="reference"))
    model = model if compiled == "on" else model.double()
    init_weights(model, seed=0, std=0.2, num_layers=NUM_LAYERS)
    again = of_entries(tuple(entries), NUM_LAYERS)
    regional.apply(model, CompileConfig(compiled), torch.device("cpu"), recompute.borders(model, again))
    recompute.apply(model, again)
    return model


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.randint(64, (number, 2, 2, 12), generator=torch.Generator().manual_seed(3))
    return [(tokens, labels) for tokens, labels in drawn]


def gradients(model: Transformer, losses: Sequence[Tensor]) -> list[Tensor]:
    for loss in losses:
        loss.backward()
    return [*losses, *(parameter.grad for parameter in model.parameters())]


@cache
def plain(kind: str, number: int = 1, compiled: str = "off") -> list[Tensor]:
    """Losses and gradients without recompute."""
    model = build(kind, compiled=compiled)
    return gradients(model, [model(*batch) for batch in batches(number)])


def assert_same_bits(values: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(values, expected, strict=True))


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("number", range(8))
def test_gradients_are_the_same_bits(kind: str, number: int) -> None:
    """With every name alone, and then with all."""
    names = [NAMES[kind][number]] if number < len(NAMES[kind]) else NAMES[kind]
    model = build(kind, names)
    assert_same_bits(gradients(model, [model(*batches(1)[0])]), plain(kind))


@pytest.mark.parametrize("entries", [("norms:1",), ("norms:-1", "experts:-1"), ("norms:1-1", "dense_mlp", "block:-1")])
def test_some_layers_are_computed_again(entries: tuple[str, ...]) -> None:
    model = build("gqa", entries)
    again = of_entries(entries, NUM_LAYERS)
    is_changed = ["forward" in vars(model.layers[str(layer)].ffn_norm) for layer in range(NUM_LAYERS)]
    assert is_changed == ["norms" in again.names_of(layer) for layer in range(NUM_LAYERS)]
    assert_same_bits(gradients(model, [model(*batches(1)[0])]), plain("gqa"))


@pytest.mark.few("mla")
@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
def test_compiled_parts_are_close(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Graphs end at other places, and round otherwise. With all names, and with some of some layers."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    expected = plain(kind, compiled="on")
    for entries in (NAMES[kind], ["norms:1", "shared_experts:2-2", "attention:-1", "dense_mlp"]):
        model = build(kind, entries, compiled="on")
        values = gradients(model, [model(*batches(1)[0])])
        for value, other in zip(values, expected, strict=True):
            assert float((value - other).detach().abs().max()) <= 1e-6 * float(other.detach().abs().max())


class Storages:
    """Of outputs of a part, whether they still live."""

    def __init__(self) -> None:
        self.refs = list[int]()

    def of(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """The part, whose outputs are noted, but for views of inputs."""

        def noting(*args: Any) -> Any:
            outputs = part(*args)
            given = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
            for output in tree_flatten(outputs)[0]:
                if isinstance(output, Tensor) and output.untyped_storage().data_ptr() not in given:
                    self.refs.append(output.untyped_storage()._weak_ref())
            return outputs

        return noting

    def are_freed(self) -> list[bool]:
        """The answer for each output in turn; nothing is noted any more."""
        refs, self.refs = self.refs, []
        freed = [torch.UntypedStorage._expired(ref) for ref in refs]
        for ref in refs:
            torch.UntypedStorage._free_weak_ref(ref)
        return freed


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("what", ["nothing", "each", "all"])
def test_memory_is_free_when_a_block_has_run(kind: str, what: str) -> None:
    outputs_of = tuple(name for name in NAMES[kind] if RECOMPUTABLE[name].how == "outputs")
    for name in outputs_of:
        model, storages, freed = build(kind).float(), Storages(), list[bool]()
        entries = {"nothing": (), "each": (name,), "all": (*outputs_of, "attention")}[what]
        for block in model.layers.values():
            if isinstance(block.feed_forward, MoE):  # as if it cast them
                block.feed_forward.experts.transforms["local"] = EachWeight(Tensor.clone)
            for _, module, method in recompute.parts_of(block, [name]):
                setattr(module, method, storages.of(getattr(module, method)))
        recompute.apply(model, of_entries(entries, NUM_LAYERS))
        for block in model.layers.values():
            block.register_forward_hook(lambda *_, into=freed, of=storages: into.extend(of.are_freed()))
        loss = model(*batches(1)[0])
        assert freed and all(is_free == (what != "nothing") for is_free in freed), name
        loss.backward()
        assert all(storages.are_freed()), "nor is anything left behind by backward"


def counting(part: Callable[..., Any], calls: list[str], name: str) -> Callable[..., Any]:
    """A part that notes its name when it is called."""
    return lambda *args: (calls.append(name), part(*args))[1]


def test_backward_makes_the_outputs_of_a_part_once() -> None:
    """Those of norms are read by projections, routers, dispatchers and shared experts."""
    model, calls = build("gqa"), list[str]()
    for layer, block in model.layers.items():
        for name, module, method in recompute.parts_of(block, NAMES["gqa"]):
            if RECOMPUTABLE[name].how == "outputs":
                setattr(module, method, counting(getattr(module, method), calls, f"{name} {layer}"))
    recompute.apply(model, of_entries(tuple(NAMES["gqa"]), NUM_LAYERS))
    loss = model(*batches(1)[0])
    first = sorted(calls)
    calls.clear()
    loss.backward()
    assert set(first) >= {"norms 0", "qkv_rope 2", "dense_mlp 0", "shared_experts 1"} and sorted(calls) == first


@pytest.mark.parametrize("kind", NAMES)
def test_microbatches_may_be_in_flight(kind: str) -> None:
    model = build(kind, NAMES[kind])
    assert_same_bits(gradients(model, [model(*batch) for batch in batches(3)]), plain(kind, 3))


def test_a_forward_without_gradients_is_untouched() -> None:
    model, expected = build("gqa", NAMES["gqa"]), build("gqa")
    for each in (model, expected):
        each.eval()
    with torch.no_grad():
        assert torch.equal(model(*batches(1)[0]), expected(*batches(1)[0]))
    with torch.inference_mode():
        assert torch.equal(model(*batches(1)[0]), expected(*batches(1)[0]))
    assert_same_bits(gradients(model, [model(*batches(1)[0])]), plain("gqa"))


class OwnBlock(nn.Module):
    """A user's block, which has one of its norms by the known name, and its experts elsewhere."""

    def __init__(self, config: ModelConfig, *, is_dense: bool, kernels: Kernels) -> None:
        super().__init__()
        self.ffn_norm = nn.RMSNorm(config.hidden_size)
        self.mixture = MoE(config, kernels=kernels)

    def forward(self, x_BND: Tensor, context: Any) -> Tensor:
        return x_BND + self.mixture(self.ffn_norm(x_BND))


@pytest.mark.parametrize(("name", "reads"), [("norms", 1), ("experts", 2), ("shared_experts", 1), ("mla_up", 1)])
def test_a_users_block_may_lack_a_part(name: str, reads: int) -> None:
    values, counted = [], []
    for entries in ((), (name,)):
        model = type("Model", (Transformer,), {"block_class": OwnBlock})(config_of("gqa"))
        init_weights(model, seed=0, std=0.2, num_layers=NUM_LAYERS)
        recompute.apply(model, of_entries(entries, NUM_LAYERS))
        for block in model.layers.values():
            block.mixture.experts.transforms["local"] = EachWeight(lambda weight: counted.append(1) or weight)
        values.append(gradients(model, [model(*batches(1)[0])]))
    assert_same_bits(*values)
    assert len(counted) == (1 + reads) * 2 * NUM_LAYERS, "two weights, in forward and in backward of experts"


def parts(number: int, outputs: RepeatedOutputs, calls: list[int]) -> Iterator[Callable[..., Any]]:
    """Parts that count their calls."""

    def part(x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        calls.append(index)
        return x.sin(), x[1:]

    for index in range(number):
        yield outputs.of(lambda x, index=index: part(x, index))


def test_an_output_may_be_the_input_of_another_part() -> None:
    """A chain of three is made again from the first input, each part once; its other output, a view, is kept."""
    calls, outputs = [], RepeatedOutputs()
    chain = list(parts(3, outputs, calls))

    def forward(x: Tensor) -> Tensor:
        views = []
        for part in chain:
            x, view = part(x)
            views.append(view)
        return (x * x).sum() + sum((view * view).sum() for view in views)

    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    y = outputs.in_scope(forward)(x)
    assert calls == [0, 1, 2]
    calls.clear()
    y.backward(retain_graph=True)
    assert sorted(calls) == [0, 1, 2]
    got, x.grad = x.grad, None
    forward(x).backward()
    assert torch.equal(got, x.grad)
    x.grad = None
    y.backward()
    assert torch.equal(got, x.grad), "a second backward makes them once more"


def test_views_of_an_output_are_made_again() -> None:
    calls, outputs = [], RepeatedOutputs()
    (part,) = parts(1, outputs, calls)

    def forward(x: Tensor) -> Tensor:
        y, _ = part(x)
        pieces = y[2:].T, y.unflatten(0, (2, 3))[1], y.T.flatten()[:2], y[:, 1::2]  # the third is a copy
        return sum((piece * piece).sum() for piece in pieces)

    grads = []
    for run in (outputs.in_scope(forward), forward):
        x = torch.linspace(0, 1, 24, dtype=torch.float64).reshape(6, 4).requires_grad_()
        run(x).backward()
        grads.append(x.grad)
    assert torch.equal(*grads) and len(calls) == 3


def test_a_forward_that_fails_leaves_nothing_open() -> None:
    calls, outputs = [], RepeatedOutputs()
    (part,) = parts(1, outputs, calls)

    def failing(x: Tensor) -> Tensor:
        part(x)
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        outputs.in_scope(failing)(torch.ones(2, requires_grad=True))
    x = torch.ones(2, requires_grad=True)
    y, _ = part(x)
    (y * y).sum().backward()
    assert calls == [0, 0], "outside of a block a part is as it was"


def test_autocast_of_forward_is_that_of_the_repeated_part() -> None:
    linear, outputs = nn.Linear(8, 8, bias=False), RepeatedOutputs()
    part, dtypes = outputs.of(lambda x: (dtypes.append((y := linear(x)).dtype), y)[1]), []
    x = torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = outputs.in_scope(lambda x: part(x).float().square().sum() + part(x).square().sum())(x)
    y.backward()
    assert set(dtypes) == {torch.bfloat16} and len(dtypes) > 2


def test_other_strides_are_an_error() -> None:
    calls, outputs = [], RepeatedOutputs()

    @outputs.of
    def part(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin() if len(calls) == 1 else x.sin().T.contiguous().T

    y = outputs.in_scope(lambda x: part(x).square().sum())(torch.ones(2, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"strides \(1, 2\), .* made with \(3, 1\); name fewer parts"):
        y.backward()
